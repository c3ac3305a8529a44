"""``SliceAccumulator``: the states of many batches and ranks, added up where the tensors lie."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyrlstats import _dispatch
from pyrlstats._inputs import Masks, as_ids, device_of, gate, masks_by_name
from pyrlstats.groups.inputs import with_groups
from pyrlstats.groups.options import Options, groups_of
from pyrlstats.layout import Layout, check_clip, check_layout, check_names
from pyrlstats.slice_stats import SliceStats
from pyrlstats.state import Group, State, group_parts, on_one_device

if TYPE_CHECKING:
    from pyrlstats.distributed import Handle, Reduction

_DEFAULT_LAYOUT = Layout()


class SliceAccumulator:
    """Adds up the states of many batches: micro-batches, ranks, steps.

    Names, layout and clip are fixed here. The memory is allocated once: here where ``device`` is given, else at
    the first ``update``, on its inputs' device.

    Args:
        names: slice names, distinct, not empty, without "/".
        layout: bins of the histogram.
        clip: (low, high) of the ratio clip.
        device: where the inputs will be; None takes the first inputs' device. ``torch.compile`` and CUDA graphs
            need it given.
        sequences: keep statistics over sequences too. ``update`` takes ``cu_seqlens``; without it the rows of logp are
            sequences. A sequence must lie in one update of one rank.
        advantages: keep what depends on advantages; ``update`` must be given them.
        dual_clip, truncate, entropy, probabilities: as :func:`slice_stats`.

    Raises:
        TypeError: a switch that is no bool.
        ValueError: names, clip or other options that do not fit.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        layout: Layout = _DEFAULT_LAYOUT,
        clip: tuple[float, float] = (0.2, 0.2),
        device: Any = None,
        sequences: bool = False,
        advantages: bool = False,
        dual_clip: float = 3.0,
        truncate: tuple[float, float] | None = None,
        entropy: bool = False,
        probabilities: bool = False,
    ) -> None:
        self.names = check_names(names)
        self.layout = check_layout(layout)
        self.clip = check_clip(clip)
        options = Options(sequences, advantages, dual_clip, truncate, entropy, probabilities)
        self._keep(groups_of(options, self.clip))
        self._state: State | None = None if device is None else self._empty_on(device)
        self._reduced = False  # the state holds other ranks' tokens
        self._borrowed = False  # the state came with a reduction: reset() forgets it with its device
        self._pending: Handle | None = None
        self._reduction: Reduction | None = None

    @property
    def device(self) -> Any:
        """The torch device of the state; None for NumPy memory and before the first update."""
        return None if self._state is None else device_of(self._state.buffer)

    def update(
        self,
        logp: Any,
        old_logp: Any,
        masks: Masks = None,
        *,
        slice_ids: Any = None,
        mask: Any = None,
        advantages: Any = None,
        cu_seqlens: Any = None,
    ) -> SliceAccumulator:
        """Count one batch; the arguments are those of :func:`slice_stats`. Does not sync.

        Works inside ``torch.compile(fullgraph=True)`` and under CUDA graph capture.

        Raises:
            TypeError, ValueError: as :func:`slice_stats`, and for missing or unknown slice names, advantages missing
                or not asked for, or another device than before. Nothing has been counted then.
            RuntimeError: after ``all_reduce`` or ``reduce`` without ``reset``: those tokens would count twice.
        """
        self._check_local("update")
        masks, slice_ids, _ = as_ids(masks, slice_ids, self.names)
        if slice_ids is not None and masks is not None:
            raise ValueError("masks and slice_ids exclude each other: give one of them")
        if _is_compiling():
            return self._update_compiled(logp, old_logp, masks, slice_ids, mask, advantages, cu_seqlens)
        batch = gate(logp, old_logp, masks, slice_ids, mask, self.names)
        if self.groups or not (advantages is cu_seqlens is None):
            batch = with_groups(batch, self.groups, advantages, cu_seqlens)
        _dispatch.accumulate(batch, self._state_for(device_of(batch.logp)))
        return self

    def compute(self) -> SliceStats:
        """The statistics of everything counted so far. A copy: later updates do not change it. Does not sync."""
        if self._state is None:
            return SliceStats(self._empty(None))
        return SliceStats(self._state.copy())

    def reset(self) -> SliceAccumulator:
        """Forget every token; names, layout, clip and memory stay. Waits for a reduction under way."""
        if self._pending is not None:
            self._pending.wait()
        if self._state is not None:
            self._state.clear_()
        if self._borrowed:
            self._state = None
        self._reduced = self._borrowed = False
        return self

    def merge(self, other: SliceAccumulator | SliceStats | Iterable[SliceAccumulator | SliceStats]) -> SliceAccumulator:
        """Count what ``other``, one or several, has counted too. ``other`` is not changed. Does not sync.

        What lies in NumPy memory is moved to the device of the rest. Whoever merges a reduced accumulator counts as
        reduced: it holds other ranks' tokens.

        Raises:
            TypeError: statistics of another kind, or no statistics.
            ValueError: other names, layout or clip, or tensors on different devices; nothing is changed.
            RuntimeError: a reduction is under way, or done without ``reset`` since: merge results
                (``acc.compute() + other``) to pool a global state with more.
        """
        self._check_idle()
        self._check_local("merge")
        single = not isinstance(other, Iterable) or isinstance(other, (Mapping, str, bytes))
        others: list[Any] = [other] if single else list(other)  # type: ignore[arg-type]
        for one in others:
            if not isinstance(one, (SliceAccumulator, SliceStats)):
                raise TypeError(f"merge takes SliceAccumulator, SliceStats or an iterable, got {type(one).__name__}")
        states = [one.state if isinstance(one, SliceStats) else one._state or one._empty(None) for one in others]
        first, *rest = on_one_device([self._state or self._empty(None), *states])
        pooled = first.copy()
        for state in rest:
            pooled.merge_(state)
        if self._state is not None and self.device == device_of(pooled.buffer):
            self._state.buffer[...] = pooled.buffer
        else:
            self._state = pooled
        self._reduced |= any(isinstance(one, SliceAccumulator) and one._reduced for one in others)
        return self

    merge_state = merge  # the name that torchmetrics and torcheval use

    def __iadd__(self, other: SliceAccumulator | SliceStats) -> SliceAccumulator:  # type: ignore[misc]
        return self.merge(other)

    def __add__(self, other: object) -> SliceAccumulator:
        """A new accumulator that holds what both hold."""
        if not isinstance(other, (SliceAccumulator, SliceStats)):
            return NotImplemented
        return self._twin().merge([self, other])

    def __radd__(self, other: object) -> SliceAccumulator:
        if isinstance(other, SliceStats):
            return self + other
        # sum() starts at 0
        return self + SliceStats(self._empty(None)) if other == 0 else NotImplemented

    def all_reduce(self, group: Any = None, async_op: bool = False) -> Any:
        """Replace the state by the pooled one of all ranks: one MAX and one SUM collective of fixed size.

        Every rank of the group must call it, with or without tokens. The first call on a group with an accumulator
        of this make (names, layout, clip) compares them and the version in one more small collective, which syncs;
        later calls do not sync. Make, copy and load accumulators on all ranks together: where one rank reduces a
        make that is new to it and the others one that they have compared before, their collectives do not match.

        Args:
            group: a ``torch.distributed`` process group; None is the default group. It must hold every rank
                that has other tokens, and no two ranks that have the same: with data parallelism (DDP, FSDP) the
                data-parallel group; with context parallelism the data x context group; never a tensor-parallel one.
            async_op: return a handle whose ``wait()`` gives the accumulator, instead of the accumulator.

        Returns:
            The accumulator, or the handle. ``update`` raises until ``reset``.

        Raises:
            ValueError: names, layout, clip or version differ between ranks; the same error on every rank.
            RuntimeError: no process group, called twice without ``reset``, or a collective failed or timed out
                (from torch.distributed). The state is unchanged then.
        """
        return self._reduce(None, group, async_op)

    def reduce(self, dst: int = 0, group: Any = None, async_op: bool = False) -> Any:
        """As :meth:`all_reduce`, with the pooled state on rank ``dst`` (a global rank) only.

        The other ranks keep the state of their own tokens. ``update`` raises everywhere until ``reset``.
        """
        return self._reduce(dst, group, async_op)

    def _reduce(self, dst: int | None, group: Any, async_op: bool) -> Any:
        from pyrlstats.distributed import Reduction

        if self._reduced:
            raise RuntimeError("this state is already reduced: call reset() before the next reduction")
        if self._reduction is None:
            self._reduction = Reduction()
        handle = self._reduction.start(self, group, dst, async_op)
        return handle if async_op else handle.wait()

    def _twin(self) -> SliceAccumulator:
        """An empty accumulator of the same make."""
        twin = SliceAccumulator(self.names, layout=self.layout, clip=self.clip)
        twin._keep(self.groups)
        return twin

    def _keep(self, groups: tuple[Group, ...]) -> None:
        self.groups = groups
        self._groups_text = json.dumps([group_parts(group) for group in groups])  # torch.compile cannot trace json

    def _update_compiled(
        self,
        logp: Any,
        old_logp: Any,
        masks: Masks,
        slice_ids: Any,
        mask: Any,
        advantages: Any,
        cu_seqlens: Any,
    ) -> SliceAccumulator:
        from pyrlstats import _ops

        if self._state is None or self.device is None:
            raise RuntimeError("torch.compile needs to know where the state lies: SliceAccumulator(names, device=...)")
        if masks is not None:
            masks = masks_by_name(masks, self.names)
        _ops.accumulate(logp, old_logp, masks, slice_ids, mask, advantages, cu_seqlens, self._state, self._groups_text)
        return self

    def _empty(self, device: Any) -> State:
        return State.empty(self.names, self.layout, self.clip, device, self.groups)

    def _empty_on(self, device: Any) -> State:
        """An empty state for inputs on ``device``."""
        return self._empty(_state_device(device))

    def _state_for(self, device: Any) -> State:
        """The state in the inputs' kind of memory, on their device; allocated, or moved there, at the first call."""
        if self._state is None:
            self._state = self._empty(device)
        mine = self.device
        if mine == device:
            return self._state
        if mine is None:  # NumPy memory has no device yet; as a CPU tensor it stays where it is
            self._state = SliceStats(self._state).to(device).state
            return self._state
        if device is None and mine.type == "cpu":
            return self._state.to_host()  # the same memory
        raise ValueError(
            f"logp must be on the accumulator's device {mine}, got {device or 'cpu'}: move it with "
            f".to({str(mine)!r}), or use one accumulator a device and merge their statistics"
        )

    def _receive(self, state: State) -> None:
        """Take over the state that a reduction has filled: this accumulator's own, unless it had none."""
        self._borrowed |= self._state is None
        self._state = state

    def __getstate__(self) -> dict[str, Any]:
        """Without buffers, in NumPy memory; it moves to the device of the first inputs."""
        self._check_idle()
        state = None if self._state is None else self._state.to_host()
        return {**vars(self), "_state": state, "_reduction": None}

    def __copy__(self) -> SliceAccumulator:
        """With a state of its own on the same device, without buffers."""
        self._check_idle()
        twin = self._twin()
        twin._state = None if self._state is None else self._state.copy()
        twin._reduced, twin._borrowed = self._reduced, self._borrowed
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> SliceAccumulator:
        return self.__copy__()

    def _check_local(self, call: str) -> None:
        if self._reduced:
            raise RuntimeError(
                f"{call} after a reduction would mix this rank's tokens into the global state: call reset() first"
            )

    def _check_idle(self) -> None:
        if self._pending is not None:
            raise RuntimeError("a reduction is under way: call wait() on its handle first")

    def __repr__(self) -> str:
        """Names, layout, clip and a table of the statistics so far. Copies the state to the host."""
        return f"SliceAccumulator({list(self.names)}, layout={self.layout}, clip={self.clip})\n{self.compute()}"


def _state_device(device: Any) -> Any:
    """The torch device that holds the state of inputs on ``device``: the CPU where it has no float64 (MPS)."""
    import torch

    wanted = torch.device(device)
    if wanted.type == "mps":
        return torch.device("cpu")
    if wanted.type == "cuda" and wanted.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return wanted


def _is_compiling() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.compiler.is_compiling())
