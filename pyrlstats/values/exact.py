"""Exact quantiles of values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyrlstats._inputs import Masks, gate
from pyrlstats.backends.tokens import zeros_like
from pyrlstats.cells import Numbers
from pyrlstats.exact import select
from pyrlstats.state import Array
from pyrlstats.values.arguments import as_floats, prepared
from pyrlstats.values.stats import VALUE_LAYOUT, ValueStats


def exact_quantiles(
    x: Any,
    masks: Masks,
    q: Numbers,
    *,
    slice_ids: Any = None,
    names: Sequence[str] | None = None,
    mask: Any = None,
    absolute: bool = False,
    stats: ValueStats | None = None,
    group: Any = None,
    num_threads: int | None = None,
) -> dict[str, Array]:
    """Quantiles of values, exact to the bit: the value of rank max(1, ceil(q n_finite)) of every slice.

    Always one of the values, rounded to float32 as :func:`value_stats` does; so a median reward is a reward, and a
    p99 length a length.

    Args:
        x, masks, slice_ids, names, mask: as for :func:`value_stats`.
        q, absolute, stats, group, num_threads: as for :func:`pyrlstats.exact_quantiles`; ``stats`` from
            :func:`value_stats`.

    Returns:
        Slice name -> float64 on x's device, in the unit of the values, 0-d for a number and (len(q),) for a sequence;
        NaN for a slice without finite values. Does not sync on a GPU.

    Raises:
        TypeError, ValueError: as :func:`value_stats` and :func:`pyrlstats.exact_quantiles`.
    """
    if stats is not None and not isinstance(stats, ValueStats):
        raise TypeError(f"stats must be ValueStats, got {type(stats).__name__}")
    values, given = prepared({"x": as_floats("x", x)}, masks, slice_ids, mask, names)
    known, array = given["names"], values["x"]
    batch = gate(array, zeros_like(array), given["masks"], given["slice_ids"], given["mask"], known)
    state = None if stats is None else stats.state
    return select(batch, known, q, absolute, state, group, num_threads, VALUE_LAYOUT)
