"""What users call: ``slice_stats`` for one call, ``SliceAccumulator`` in a loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pyrlstats import _dispatch
from pyrlstats._inputs import Masks, check_clip, check_names, device_of, gate, resolve_names
from pyrlstats.backends.batch import Batch
from pyrlstats.layout import Layout
from pyrlstats.slice_stats import SliceStats
from pyrlstats.state import State

_DEFAULT_LAYOUT = Layout()


def slice_stats(
    logp: Any,
    old_logp: Any,
    masks: Masks = None,
    *,
    slice_ids: Any = None,
    names: Sequence[str] | None = None,
    mask: Any = None,
    clip: tuple[float, float] = (0.2, 0.2),
    layout: Layout = _DEFAULT_LAYOUT,
) -> SliceStats:
    """Distribution statistics of the per-token log-ratio, slice by slice, in one pass over the tokens.

    Samples come from the old (behaviour) policy: ``x = logp - old_logp`` in nats, ratio ``w = exp(x)``.

    Args:
        logp, old_logp: log-probabilities (nats) under the new and the old policy: torch tensors, NumPy arrays or
            DLPack objects of one shape, any shape and strides; float32, bfloat16, float16 or float64, the two
            may differ. Both are widened to float32 before the subtraction (float64 is subtracted in float64 and
            rounded once). They are detached; no graph is kept.
        masks: None (one slice "all" of every token), one array (the slice "all"), a mapping name -> array, or a
            sequence of arrays with ``names``. bool, integer or float; non-zero, NaN included, is a member.
            Shapes broadcast to logp's. Slices may overlap. A value outside never takes part in arithmetic.
        slice_ids: instead of ``masks``, one integer a token: the index into ``names``; negative is no slice,
            too large is counted in ``n_out_of_range``.
        names: slice names, distinct, not empty, without "/".
        mask: ANDed into every slice, such as a response mask; broadcasts to logp's shape.
        clip: (low, high) of the ratio clip, 0 < low < 1, high > 0.
        layout: bins of the histogram.

    Returns:
        A mapping slice name -> statistics, on the inputs' device (NumPy in, NumPy out). Does not sync. NaN and
        infinite x are counted and excluded from everything else; a slice without finite tokens has NaN
        statistics and counts of 0.

    Raises:
        TypeError: not an array, or a dtype that is not accepted.
        ValueError: shapes, devices, names or clip that do not fit.
    """
    checked_clip = check_clip(clip)
    checked_names = resolve_names(masks, slice_ids, names)
    batch = _computable(gate(logp, old_logp, masks, slice_ids, mask, checked_names))
    state = State.empty(checked_names, layout, checked_clip, device_of(batch.logp))
    _dispatch.accumulate(batch, state)
    return SliceStats(state)


def _computable(batch: Batch) -> Batch:
    """The batch itself, or on the CPU where its device has no float64 (MPS)."""
    device = device_of(batch.logp)
    if device is None or device.type != "mps":
        return batch

    def cpu(array: Any) -> Any:
        return None if array is None else array.cpu()

    masks = None if batch.masks is None else tuple(cpu(mask) for mask in batch.masks)
    return Batch(cpu(batch.logp), cpu(batch.old_logp), masks, cpu(batch.slice_ids), cpu(batch.base_mask))


class SliceAccumulator:
    """Adds up the states of many batches: micro-batches of a step, or steps.

    Names, layout and clip are fixed here; the memory is allocated at the first ``update``, on its inputs' device.

    Args:
        names: slice names, distinct, not empty, without "/".
        layout: bins of the histogram.
        clip: (low, high) of the ratio clip.
        device: where the inputs will be, checked at ``update``; None takes the first inputs' device.

    Raises:
        ValueError: names or clip that do not fit.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        layout: Layout = _DEFAULT_LAYOUT,
        clip: tuple[float, float] = (0.2, 0.2),
        device: Any = None,
    ) -> None:
        self.names = check_names(names)
        self.layout = layout
        self.clip = check_clip(clip)
        self.device = device
        self._state: State | None = None

    def update(
        self,
        logp: Any,
        old_logp: Any,
        masks: Masks = None,
        *,
        slice_ids: Any = None,
        mask: Any = None,
    ) -> SliceAccumulator:
        """Count one batch; the arguments are those of :func:`slice_stats`. Does not sync.

        Raises:
            TypeError, ValueError: as :func:`slice_stats`, and for missing or unknown slice names or another
                device than before. Nothing has been counted then.
        """
        if slice_ids is not None and masks is not None:
            raise ValueError("masks and slice_ids exclude each other: give one of them")
        batch = gate(logp, old_logp, masks, slice_ids, mask, self.names)
        self._check_device(device_of(batch.logp))
        batch = _computable(batch)
        _dispatch.accumulate(batch, self._state_for(device_of(batch.logp)))
        return self

    def compute(self) -> SliceStats:
        """The statistics of everything counted so far. A copy: later updates do not change it."""
        if self._state is None:
            return SliceStats(State.empty(self.names, self.layout, self.clip, self.device))
        return SliceStats(self._state.copy())

    def reset(self) -> SliceAccumulator:
        """Forget every token; names, layout, clip and memory stay."""
        if self._state is not None:
            self._state.clear_()
        return self

    def merge(self, other: SliceAccumulator | SliceStats) -> SliceAccumulator:
        """Count what ``other`` has counted too. ``other`` is not changed.

        Raises:
            ValueError: other names, layout, clip or device; nothing is changed.
        """
        theirs = other.state if isinstance(other, SliceStats) else other.compute().state
        if self._state is None:
            mine = State.empty(self.names, self.layout, self.clip, device_of(theirs.buffer))
            mine.merge_(theirs)
            self._state = mine
        else:
            self._state.merge_(theirs)
        return self

    def _check_device(self, device: Any) -> None:
        if self.device is None:
            return
        import torch

        wanted = torch.device(self.device)
        got = torch.device("cpu") if device is None else device
        if wanted.type != got.type or wanted.index not in (None, got.index):
            raise ValueError(
                f"logp must be on the accumulator's device {wanted}, got {got}: move it with .to({str(wanted)!r})"
            )

    def _state_for(self, device: Any) -> State:
        """The state, allocated at the first call, as memory of the inputs' kind."""
        if self._state is None:
            self._state = State.empty(self.names, self.layout, self.clip, device)
        mine = device_of(self._state.buffer)
        if mine == device:
            return self._state
        if device is None and mine.type == "cpu":
            return replace(self._state, buffer=self._state.buffer.numpy())
        if mine is None and device.type == "cpu":
            import torch

            self._state = replace(self._state, buffer=torch.from_numpy(self._state.buffer))
            return self._state
        raise ValueError(
            f"logp must be on the device of the first update, {mine or 'cpu'}, got {device or 'cpu'}: "
            "use one accumulator a device and merge their statistics"
        )

    def __repr__(self) -> str:
        return f"SliceAccumulator({list(self.names)}, layout={self.layout}, clip={self.clip})\n{self.compute()}"
