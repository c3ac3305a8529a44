"""The mergeable state: what the kernels fill and every statistic reads.

One flat buffer of int64 words, so that a state is one allocation, one copy to the host and one payload::

    [ counts: S x len(COUNTS) | histogram: S x 2P | sums: S x len(SUMS) | maxima: S x len(MAXIMA) ]

The last two are float64 views of the same words. The size depends on slices and layout, never on data.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np

from pyrlstats.layout import COUNTS, LOG2E, MAXIMA, STATE_VERSION, SUMS, Layout, check_clip, check_names

Array = Any  # a NumPy array or a torch tensor

PARTS = {"version", "kind", "names", "layout", "clip"}  # that a saved state names beside its buffer

_MAX_COUNT = 2**53  # what float64 holds exactly
_MAX_FLOAT32 = 3.4028234663852886e38


def namespace(array: Array) -> Any:
    """``torch`` for a tensor, ``numpy`` otherwise: the functions used on states have the same names in both."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(array, torch.Tensor) else np


def scale_exponent(max_x: Array) -> Array:
    """k of the far weights' scale 2^-k: floor(max x log2 e) in float64, 0 for an empty slice.

    The same bits on every backend: one IEEE multiplication and a floor.
    """
    xp = namespace(max_x)
    return xp.floor(xp.where(xp.isfinite(max_x), max_x, 0.0) * LOG2E)


def power_of_two(exponent: Array) -> Array:
    """2^exponent exactly, for float64 integers; 0 below 2^-1022, inf above 2^1023."""
    xp = namespace(exponent)
    biased = xp.asarray(exponent.clip(-1023.0, 1024.0), dtype=xp.int64) + 1023
    return (biased << 52).view(xp.float64)


def _empty_buffer(slices: int, layout: Layout, device: Any) -> Array:
    if device is None:
        words: Array = np.zeros(words_of(slices, layout), np.int64)
        words[-slices * len(MAXIMA) :].view(np.float64)[...] = -np.inf
        return words
    import torch

    with torch.inference_mode(False):  # an accumulator is updated inside and outside of it
        words = torch.zeros(words_of(slices, layout), dtype=torch.int64, device=device)
    words[-slices * len(MAXIMA) :].view(torch.float64).fill_(-float("inf"))
    return words


def _all_counts(values: Array) -> bool:
    return bool(values.min() >= 0 and values.max() <= _MAX_COUNT)


def on_one_device(states: Sequence[State]) -> list[State]:
    """The states, those in NumPy memory moved to the device of the first that is a tensor (if one is).

    They share memory with the states given where nothing moves. Does not sync.
    """
    tensors = [state.buffer for state in states if not isinstance(state.buffer, np.ndarray)]
    if not tensors:
        return list(states)
    import torch

    return [
        replace(state, buffer=torch.from_numpy(state.buffer).to(tensors[0].device))
        if isinstance(state.buffer, np.ndarray)
        else state
        for state in states
    ]


def scale_far_weights_(sums: Array, up: Array) -> None:
    """Multiply the far weights of sums (S, len(SUMS)) by 2^up (S,), up <= 0, in place: exact.

    Merging never raises a scale, except that of an empty state, which has no far weights: up > 0 counts as 0.
    """
    factor = power_of_two(namespace(up).clip(up, None, 0.0))
    far_w, far_w2 = (sums[:, SUMS.index(name)] for name in ("far_w", "far_w2"))
    far_w *= factor
    far_w2 *= factor * factor


def words_of(slices: int, layout: Layout) -> int:
    """Size of a state's buffer in int64 words."""
    return slices * (len(COUNTS) + layout.n_bins + len(SUMS) + len(MAXIMA))


@dataclass(frozen=True)
class State:
    """Mergeable state of ``S`` slices, on one device.

    Attributes:
        names: the slices, in order.
        layout: bins of the histogram.
        clip: (low, high) of the clip counts.
        buffer: int64 (words,), the whole state. The views below share its memory.
        counts: int64 (S, len(COUNTS)), tokens.
        histogram: int64 (S, 2P), tokens; bins ascend in value; zeros and non-finite tokens are in no bin.
        sums: float64 (S, len(SUMS)).
        maxima: float64 (S, len(MAXIMA)), nats; -inf for an empty slice.
    """

    names: tuple[str, ...]
    layout: Layout
    clip: tuple[float, float]
    buffer: Array

    @classmethod
    def empty(
        cls,
        names: Sequence[str],
        layout: Layout,
        clip: tuple[float, float],
        device: Any = None,
    ) -> State:
        """A state of no tokens: on a torch device, or in NumPy memory where ``device`` is None."""
        return cls(tuple(names), layout, clip, _empty_buffer(len(names), layout, device))

    def parts(self, kind: str) -> dict[str, Any]:
        """What tells a saved buffer's meaning, as plain values: the ``kind`` of its statistics, and its make."""
        return {
            "version": STATE_VERSION,
            "kind": kind,
            "names": list(self.names),
            "layout": list(astuple(self.layout)),
            "clip": list(self.clip),
        }

    @classmethod
    def from_parts(cls, parts: Mapping[str, Any], kind: str, buffer: Array) -> State:
        """A state from what :meth:`parts` gave, checked.

        Args:
            parts: version, kind, names, layout and clip.
            kind: of the statistics wanted: "log_ratio" or "value".
            buffer: int64 (words,), taken as it is, not copied.

        Raises:
            ValueError: other parts, another version or kind, bad names, layout or clip, or a buffer that does not fit.
        """
        if set(parts) != PARTS:
            raise ValueError(f"the parts of a state are {sorted(PARTS)}, got {sorted(map(str, parts))}")
        if parts["version"] != STATE_VERSION:
            raise ValueError(
                f"state version {STATE_VERSION} is supported, got {parts['version']!r}: use the same pyrlstats"
            )
        if parts["kind"] != kind:
            raise ValueError(f"statistics of kind {kind!r} are wanted, got {parts['kind']!r}: read them as those")
        try:
            low, high = parts["clip"]
            state = cls(check_names(parts["names"]), Layout(*parts["layout"]), check_clip((low, high)), buffer)
        except (TypeError, IndexError) as error:
            raise ValueError(f"not the parts of a state: {error}") from error
        words = words_of(len(state.names), state.layout)
        dtype, shape = getattr(buffer, "dtype", type(buffer).__name__), tuple(getattr(buffer, "shape", ()))
        if shape != (words,) or dtype != namespace(buffer).int64:
            raise ValueError(f"buffer must hold {words} int64 words, got {dtype} of shape {shape}")
        return state

    def check_consistent(self) -> None:
        """Raise ValueError unless the counts could come from tokens. Syncs."""
        host = self.to_host()
        counts = {name: host.count(name) for name in COUNTS}
        finite = host.histogram.sum(-1) + counts["n_zero"]
        highest, lowest = host.maximum("max_x"), -host.maximum("neg_min_x")
        extrema_fit = np.where(
            finite > 0,
            (lowest >= -_MAX_FLOAT32) & (lowest <= highest) & (highest <= _MAX_FLOAT32),
            (highest == -np.inf) & (lowest == np.inf),
        )
        if (
            not _all_counts(host.counts)
            or not _all_counts(host.histogram)
            or host.histogram.sum(-1, dtype=np.float64).max() > _MAX_COUNT
            or (counts["n_tokens"] != finite + counts["n_nan"] + counts["n_pos_inf"] + counts["n_neg_inf"]).any()
            or (counts["clip_low"] + counts["clip_high"] > finite).any()
            or (counts["n_far"] > finite - counts["n_zero"]).any()
            or not extrema_fit.all()
            or np.isnan(host.sums).any()
        ):
            raise ValueError("the counts of this state contradict each other: the data is damaged")

    def _view(self, start: int, columns: int) -> Array:
        slices = len(self.names)
        return self.buffer[slices * start : slices * (start + columns)].reshape(slices, columns)

    @property
    def counts(self) -> Array:
        return self._view(0, len(COUNTS))

    @property
    def histogram(self) -> Array:
        return self._view(len(COUNTS), self.layout.n_bins)

    @property
    def sums(self) -> Array:
        words = self._view(len(COUNTS) + self.layout.n_bins, len(SUMS))
        return words.view(namespace(words).float64)

    @property
    def maxima(self) -> Array:
        words = self._view(len(COUNTS) + self.layout.n_bins + len(SUMS), len(MAXIMA))
        return words.view(namespace(words).float64)

    def count(self, name: str) -> Array:
        """One row of COUNTS for every slice: int64 (S,)."""
        return self.counts[:, COUNTS.index(name)]

    def sum(self, name: str) -> Array:
        """One row of SUMS for every slice: float64 (S,)."""
        return self.sums[:, SUMS.index(name)]

    def maximum(self, name: str) -> Array:
        """One row of MAXIMA for every slice: float64 (S,)."""
        return self.maxima[:, MAXIMA.index(name)]

    def n_finite(self) -> Array:
        """Members with finite x of every slice: int64 (S,)."""
        return self.count("n_tokens") - self.count("n_nan") - self.count("n_pos_inf") - self.count("n_neg_inf")

    def copy(self) -> State:
        """The same state in memory of its own, on the same device. Does not sync."""
        xp = namespace(self.buffer)
        return replace(self, buffer=self.buffer.clone() if xp is not np else self.buffer.copy())

    def to_host(self) -> State:
        """The same state in NumPy memory: one device-to-host copy, which syncs on a GPU."""
        buffer = self.buffer
        if namespace(buffer) is np:
            return self
        if buffer.device.type == "cuda":
            import torch

            # through pinned memory the copy engine writes directly; the cached block goes back at once
            pinned = torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=True)
            pinned.copy_(buffer, non_blocking=True)
            torch.cuda.current_stream(buffer.device).synchronize()
            return replace(self, buffer=pinned.numpy().copy())
        return replace(self, buffer=buffer.cpu().numpy())

    def clear_(self) -> None:
        """Forget every token, in place."""
        self.buffer[...] = 0
        self.maxima[...] = -float("inf")

    def check_mergeable(self, other: State) -> None:
        """Raise ValueError, naming what differs, unless ``other`` holds the same slices, layout and clip."""
        if type(self) is not type(other):
            raise ValueError("exact and decayed statistics never merge: the counts of the latter are weighted")
        for field in ("names", "layout", "clip"):
            mine, theirs = getattr(self, field), getattr(other, field)
            if mine != theirs:
                raise ValueError(
                    f"states with different {field} cannot be merged: {mine} and {theirs}; "
                    f"make both with the same {field}"
                )
        xp = namespace(self.buffer)
        if xp is not namespace(other.buffer):
            raise ValueError(
                "a state in NumPy memory and one in torch memory cannot be merged: "
                "make both from the same kind of input"
            )
        if xp is not np and self.buffer.device != other.buffer.device:
            raise ValueError(
                f"states on {self.buffer.device} and {other.buffer.device} cannot be merged: move one with .to(device)"
            )

    def merge_(self, other: State) -> None:
        """Pool ``other`` into this state, in place: SUM, MAX, and the exact rescale of the far weights.

        Raises:
            ValueError: other slices, layout, clip or device; both states are left unchanged.
        """
        self.check_mergeable(other)
        maxima = namespace(self.buffer).maximum(self.maxima, other.maxima)
        exponent = scale_exponent(maxima[:, MAXIMA.index("max_x")])
        sums = self.rescaled_sums(exponent) + other.rescaled_sums(exponent)
        for mine, theirs in ((self.counts, other.counts), (self.histogram, other.histogram)):
            mine += theirs
        self.sums[...] = sums
        self.maxima[...] = maxima

    def rescaled_sums(self, exponent: Array) -> Array:
        """A copy of the sums with far weights scaled by 2^-exponent (S,), exactly."""
        sums = self.sums + 0.0
        scale_far_weights_(sums, scale_exponent(self.maximum("max_x")) - exponent)
        return sums
