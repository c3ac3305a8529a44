"""The one place that names accumulators and bins: Python reads it, the C++ header is generated from it.

Standard library only, so that the build can run it as a script (``python -I layout.py`` prints ``layout.h``)
and so that a machine without the compiled extension can use the kernels.

Bins are log-linear on the bits of a float32 ``x``, ascending in value (``m`` = mantissa bits)::

    a   = bits(x) & 0x7fffffff
    nan : a > 0x7f800000     inf: a == 0x7f800000     zero: a == 0       (counted apart, in no bin)
    pos = clamp((a >> (23 - m)) - ((127 + min_exp) << m), 0, P - 1)
    bin = (P + pos) ^ (2P - 1 if x < 0 else 0)

The formula is written once per language: here, ``csrc/bins.h`` and ``kernels/tile.py``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

STATE_VERSION = 1

# SUM, int64. One row of the state per slice.
COUNTS = (
    "n_tokens",  # members of the slice, finite or not
    "n_nan",
    "n_pos_inf",
    "n_neg_inf",
    "n_zero",  # x == 0, either sign
    "clip_low",  # finite x < float32(log1p(-low))
    "clip_high",  # finite x > float32(log1p(high))
    "n_far",  # finite |x| >= NEAR_LIMIT
    "n_out_of_range",  # slice ids >= the number of slices; kept in the row of slice 0
)

# SUM, float64, over the finite x of the slice. Near: |x| < NEAR_LIMIT; far: the others.
# Weights are w = exp(x); k3 = expm1(x) - x. The far weights are scaled by 2^-k, k = scale_exponent(max x).
SUMS = (
    "near_x",
    "near_x2",  # x^2
    "near_k3",  # so that sum (w - 1) = near_x + near_k3
    "near_excess",  # (w - 1)^2 - x^2 = k3 (2x + k3), so that sum (w - 1)^2 = near_x2 + near_excess
    "abs_x",  # |x|, near and far
    "far_x",
    "far_x2",
    "far_k3",  # +inf where float64 overflows
    "far_w",  # 2^-k w
    "far_w2",  # 2^-2k w^2
)

# MAX, float64, over the finite x of the slice; -inf where there is none.
MAXIMA = ("max_x", "neg_min_x")


@dataclass(frozen=True)
class Table:
    """The rows of one kind of state, per slice.

    Attributes:
        counts: SUM, int64.
        sums: SUM, float64.
        maxima: MAX, float64.
        binned: whether there is a histogram.
        scaled: (sum, p): it is kept as 2^-pk of itself, k = scale_exponent(max_x), max_x being one of the maxima.
    """

    counts: tuple[str, ...] = ()
    sums: tuple[str, ...] = ()
    maxima: tuple[str, ...] = ()
    binned: bool = False
    scaled: tuple[tuple[str, int], ...] = ()


CORE = Table(COUNTS, SUMS, MAXIMA, binned=True, scaled=(("far_w", 1), ("far_w2", 2)))

# What is kept beside the core for those who ask; all over the tokens with finite x, unless it says otherwise.
ENTROPY = Table(  # w and w x with equal rounding: what is left of their ratio may be a small part of it
    sums=("near_w", "near_wx", "far_w", "far_wx"),
    maxima=("max_x",),
    scaled=(("far_w", 1), ("far_wx", 1)),
)

PROBABILITIES = Table(  # p = exp(logp), q = exp(old_logp), d = abs(p - q)
    sums=("p", "q", "p2", "q2", "pq", "d", "d2"),
    maxima=("max_p", "neg_min_p", "max_q", "neg_min_q", "max_d"),
)

POLICY_CLIP = Table(  # of the tokens whose advantage A is finite too
    counts=(
        "n_advantage",
        "n_not_finite",  # finite x, A NaN or infinite
        "low",  # w < 1 - low and A < 0
        "high",  # w > 1 + high and A > 0
        "dual",  # w > dual_clip and A < 0
    )
)

TRUNCATION = Table(  # bounds (lo, hi) of w
    counts=("below", "above"),  # w < lo, w > hi
    sums=("inside_w", "inside_w2"),
    maxima=("max_x",),  # of those inside
    scaled=(("inside_w", 1), ("inside_w2", 2)),
)

SEQUENCES = Table(counts=("n_empty",))  # sequences without a token of the slice

TABLES = {
    "core": CORE,
    "entropy": ENTROPY,
    "probabilities": PROBABILITIES,
    "policy_clip": POLICY_CLIP,
    "truncation": TRUNCATION,
    "sequences": SEQUENCES,
}

NEAR_LIMIT = 0.5  # a bin edge; below it w - 1 is summed, so that nothing cancels
LOG2E = math.log2(math.e)

ABS_BITS = 0x7FFFFFFF
INF_BITS = 0x7F800000


def float32_bits(value: float) -> int:
    """Bits of ``value`` rounded to float32, as an unsigned integer."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def float32_from_bits(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


NEAR_BITS = float32_bits(NEAR_LIMIT)


def check_clip(clip: tuple[float, float]) -> tuple[float, float]:
    """(low, high) as floats, with 0 < low < 1 and high > 0."""
    try:
        low, high = (float(bound) for bound in clip)
    except (TypeError, ValueError) as error:
        raise ValueError(f"clip must be two numbers (low, high), got {clip!r}") from error
    if not 0.0 < low < 1.0:
        raise ValueError(f"clip low must satisfy 0 < low < 1, got {low}: ratios below 1 - low are clipped")
    if not 0.0 < high < math.inf:
        raise ValueError(f"clip high must be positive and finite, got {high}: ratios above 1 + high are clipped")
    return low, high


def check_thresholds(table: str, thresholds: Sequence[float]) -> tuple[float, ...]:
    """What a table of this name counts by: (low, high) of the ratio clip, ..."""
    if table == "core":
        low, high = thresholds
        return check_clip((low, high))
    if table == "policy_clip":
        low, high, dual = thresholds
        return (*check_clip((low, high)), check_dual_clip(dual))
    if table == "truncation":
        lo, hi = thresholds
        return check_truncate((lo, hi))
    if tuple(thresholds):
        raise ValueError(f"a table {table!r} has no thresholds, got {thresholds!r}")
    return ()


def check_dual_clip(dual_clip: float) -> float:
    """c > 1, finite."""
    try:
        c = float(dual_clip)
    except (TypeError, ValueError) as error:
        raise ValueError(f"dual_clip must be a number above 1, got {dual_clip!r}") from error
    if not 1.0 < c < math.inf:
        raise ValueError(f"dual_clip must be above 1 and finite, got {c}: 3.0 is usual")
    return c


def check_truncate(truncate: tuple[float, float]) -> tuple[float, float]:
    """(lo, hi) as floats, 0 <= lo < hi; 0, infinite, or from 1e-100 to 1e100, whose squares float64 holds."""
    try:
        lo, hi = (float(bound) for bound in truncate)
    except (TypeError, ValueError) as error:
        raise ValueError(f"truncate must be two numbers (lo, hi), bounds of the ratio, got {truncate!r}") from error
    if not 0.0 <= lo < hi:
        raise ValueError(f"truncate must satisfy 0 <= lo < hi, got ({lo}, {hi}): bounds of the ratio, such as (0.5, 2)")
    for bound in (lo, hi):
        if bound not in (0.0, math.inf) and not 1e-100 <= bound <= 1e100:
            raise ValueError(
                f"truncate must have bounds from 1e-100 to 1e100, got ({lo}, {hi}): 0 and inf for none on that side"
            )
    return lo, hi


def check_names(names: Sequence[str]) -> tuple[str, ...]:
    """Slice names: at least one, distinct, not empty, without '/' (which separates slice and statistic in keys)."""
    if isinstance(names, str):
        raise TypeError(f"names must be a sequence of strings, got the string {names!r}: use [{names!r}]")
    checked = tuple(names)
    if not checked:
        raise ValueError("names must hold at least one slice name, got none")
    for name in checked:
        if not isinstance(name, str):
            raise TypeError(f"slice names must be strings, got {name!r} ({type(name).__name__})")
        if not name:
            raise ValueError("slice names must not be empty")
        if "/" in name:
            raise ValueError(f"slice name {name!r} must not contain '/': it separates slice and statistic")
    if len(set(checked)) != len(checked):
        twice = next(name for name in checked if checked.count(name) > 1)
        raise ValueError(f"slice name {twice!r} is given twice: names must differ")
    return checked


def check_layout(layout: object) -> Layout:
    """The layout itself.

    Raises:
        TypeError: something else.
    """
    if not isinstance(layout, Layout):
        raise TypeError(f"layout must be a pyrlstats.Layout, got {layout!r}: use pyrlstats.Layout(5, -24, 8)")
    return layout


def clip_thresholds(clip: Sequence[float]) -> tuple[float, float]:
    """The bounds on x of a ratio clip (low, high), rounded to float32 here and nowhere else.

    A token is clipped low where ``x < log1p(-low)`` and high where ``x > log1p(high)``.
    """
    low, high = clip
    return (
        float32_from_bits(float32_bits(math.log1p(-low))),
        float32_from_bits(float32_bits(math.log1p(high))),
    )


def log_bounds(*ratios: float) -> tuple[float, ...]:
    """The bounds on x of bounds on the ratio, rounded to float32 like :func:`clip_thresholds`; 0 gives -inf."""
    return tuple(float32_from_bits(float32_bits(math.log(r) if r > 0 else -math.inf)) for r in ratios)


@dataclass(frozen=True)
class Layout:
    """Bins of the histogram: ``2^mantissa_bits`` per octave and sign, octaves ``[2^min_exp, 2^max_exp)``.

    Args:
        mantissa_bits: 0 to 10. Inside the window a bin's relative width is at most ``2^-mantissa_bits``.
        min_exp: values below ``2^min_exp`` fall into the first bin of their sign: absolute error
            at most ``2^min_exp (1 + 2^-mantissa_bits)``.
        max_exp: values from ``2^max_exp`` on fall into the last bin of their sign, bounded by the exact extrema.

    Raises:
        ValueError: a field out of range, or a number of octaves that is not a power of two.
    """

    mantissa_bits: int = 5
    min_exp: int = -24
    max_exp: int = 8

    def __post_init__(self) -> None:
        for name in ("mantissa_bits", "min_exp", "max_exp"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"Layout {name} must be an int, got {type(value).__name__}")
        if not 0 <= self.mantissa_bits <= 10:
            raise ValueError(f"Layout mantissa_bits must be from 0 to 10, got {self.mantissa_bits}")
        if not -126 <= self.min_exp < self.max_exp <= 128:
            raise ValueError(
                "Layout exponents must satisfy -126 <= min_exp < max_exp <= 128, "
                f"got min_exp={self.min_exp}, max_exp={self.max_exp}"
            )
        octaves = self.max_exp - self.min_exp
        if octaves & (octaves - 1):
            wider = self.min_exp + (1 << octaves.bit_length())
            narrower = self.min_exp + (1 << (octaves.bit_length() - 1))
            raise ValueError(
                f"Layout max_exp - min_exp must be a power of two, got {octaves}: "
                f"try max_exp={wider if wider <= 128 else narrower}"
            )

    @property
    def bins_per_sign(self) -> int:
        """P."""
        return (self.max_exp - self.min_exp) << self.mantissa_bits

    @property
    def n_bins(self) -> int:
        """2P, a power of two: the negative bins, then the positive ones."""
        return 2 * self.bins_per_sign

    @property
    def shift(self) -> int:
        return 23 - self.mantissa_bits

    @property
    def offset(self) -> int:
        return (127 + self.min_exp) << self.mantissa_bits

    def bin_index(self, bits: Any) -> Any:
        """Bins of float32 bit patterns that are finite and not zero.

        Args:
            bits: integer array or tensor of any shape, **signed** int32 reinterpretation of float32.

        Returns:
            Integer array or tensor of the same shape, in [0, 2P). NaN, inf and zero get some bin: callers
            count those apart.
        """
        positive = self.bins_per_sign
        pos = (((bits & ABS_BITS) >> self.shift) - self.offset).clip(0, positive - 1)
        return (positive + pos) ^ ((bits < 0) * (2 * positive - 1))

    @cached_property
    def abs_edges(self) -> tuple[float, ...]:
        """The P + 1 edges of abs(x), ascending: 0, then every bin's lower edge, then inf. Bins are [lo, hi)."""
        inner = (float32_from_bits((pos + self.offset) << self.shift) for pos in range(1, self.bins_per_sign))
        return (0.0, *inner, math.inf)


def c_header() -> str:
    """Text of ``layout.h``: the tables above as C++ constants."""

    def camel(name: str) -> str:
        return "".join(part.capitalize() for part in name.split("_"))

    def enum(prefix: str, names: tuple[str, ...]) -> str:
        return f"enum {{ {', '.join(prefix + camel(name) for name in names)}, {prefix}Size }};"

    groups = [
        enum(f"k{camel(name)}{kind}", rows)
        for name, table in TABLES.items()
        if table is not CORE
        for kind, rows in (("Count", table.counts), ("Sum", table.sums), ("Max", table.maxima))
        if rows
    ]

    return "\n".join(
        (
            "// Generated by pyrlstats/layout.py.",
            "#pragma once",
            "#include <cstdint>",
            "namespace layout {",
            f"constexpr int kStateVersion = {STATE_VERSION};",
            enum("kCount", COUNTS),
            enum("kSum", SUMS),
            enum("kMax", MAXIMA),
            *groups,
            f"constexpr uint32_t kAbsBits = {ABS_BITS:#x};",
            f"constexpr uint32_t kInfBits = {INF_BITS:#x};",
            f"constexpr uint32_t kNearBits = {NEAR_BITS:#x};",
            f"constexpr double kLog2E = {LOG2E!r};",
            "}  // namespace layout",
            "",
        )
    )


if __name__ == "__main__":
    print(c_header(), end="")
