"""Explained variance of a critic's predictions, slice by slice, from co-moments that do not cancel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyrlstats._inputs import Masks, gate
from pyrlstats.state import Array, namespace
from pyrlstats.values.arguments import as_floats, prepared
from pyrlstats.values.pooling import Poolable, pooled


@dataclass(frozen=True, eq=False)
class ExplainedVariance(Poolable, Mapping[str, Any]):
    """How much of the returns' variance the predicted values explain, slice by slice; mergeable.

    Equal only to itself, and hashable.

    Attributes:
        names: the slices, in order.
        n: int64 (S,), pairs with both finite.
        n_non_finite: int64 (S,), pairs with a NaN or infinite value or return: excluded.
        mean_return, mean_error: float64 (S,), means of the returns and of ``return - value``; 0 where n is 0.
        m2_return, m2_error: float64 (S,), sums of squared deviations from those means.
        n_out_of_range: int64, 0-d, pairs whose slice id named no slice: they are in none.
    """

    names: tuple[str, ...]
    n: Array
    n_non_finite: Array
    mean_return: Array
    m2_return: Array
    mean_error: Array
    m2_error: Array
    n_out_of_range: Array

    def __getitem__(self, name: str) -> Array:
        """The explained variance of one slice, 0-d."""
        try:
            return self.explained_variance[self.names.index(name)]
        except ValueError:
            raise KeyError(f"no slice {name!r}; there are {list(self.names)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    @property
    def explained_variance(self) -> Array:
        """float64 (S,): 1 - var(return - value) / var(return), at most 1; NaN without pairs or for equal returns."""
        xp = namespace(self.m2_return)
        return 1.0 - self.m2_error / xp.where(self.m2_return > 0, self.m2_return, float("nan"))

    @property
    def error_mean(self) -> Array:
        """float64 (S,): mean(return - value), the bias that explained variance does not see."""
        return namespace(self.n).where(self.n > 0, self.mean_error, float("nan"))

    @property
    def error_std(self) -> Array:
        """float64 (S,): population standard deviation of return - value."""
        return self._std(self.m2_error)

    @property
    def return_std(self) -> Array:
        """float64 (S,): population standard deviation of the returns."""
        return self._std(self.m2_return)

    def _std(self, m2: Array) -> Array:
        xp = namespace(m2)
        return xp.sqrt(m2 / xp.where(self.n > 0, xp.asarray(self.n, dtype=xp.float64), float("nan")))

    def merge(self, other: ExplainedVariance) -> ExplainedVariance:
        """The same of the pairs of both, by Chan, Golub and LeVeque's update: nothing cancels. Does not sync.

        Raises:
            TypeError: something else than an ExplainedVariance.
            ValueError: other slices, or tensors on different devices.
        """
        mine, theirs = self._with(other)
        if mine.names != theirs.names:
            raise ValueError(f"explained variances of different slices cannot be merged: {mine.names}, {theirs.names}")
        moments: dict[str, Array] = {}
        for what in ("return", "error"):
            mean_name, m2_name = f"mean_{what}", f"m2_{what}"
            moments[mean_name], moments[m2_name] = pooled(
                (mine.n, getattr(mine, mean_name), getattr(mine, m2_name)),
                (theirs.n, getattr(theirs, mean_name), getattr(theirs, m2_name)),
            )
        counts = ("n", "n_non_finite", "n_out_of_range")
        added = {name: getattr(mine, name) + getattr(theirs, name) for name in counts}
        return ExplainedVariance(names=mine.names, **added, **moments)

    def to_dict(self, prefix: str = "") -> dict[str, float]:
        """``{prefix + slice + "/" + statistic: value}`` and ``prefix + "n_out_of_range"`` as Python numbers.

        Copies to the host: syncs on a GPU.
        """
        keys = ("explained_variance", "error_mean", "error_std", "return_std", "n", "n_non_finite")
        xp = namespace(self.n)
        table = xp.stack([xp.asarray(getattr(self, key), dtype=xp.float64) for key in keys]).T.tolist()
        return {f"{prefix}n_out_of_range": int(self.n_out_of_range)} | {
            f"{prefix}{name}/{key}": int(value) if key.startswith("n") else value
            for name, row in zip(self.names, table, strict=True)
            for key, value in zip(keys, row, strict=True)
        }

    def __repr__(self) -> str:
        return f"ExplainedVariance({self.to_dict()})"


def explained_variance(
    values: Any,
    returns: Any,
    masks: Masks = None,
    *,
    slice_ids: Any = None,
    names: Sequence[str] | None = None,
    mask: Any = None,
) -> ExplainedVariance:
    """1 - var(returns - values) / var(returns) of each slice, from two passes in float64: nothing cancels.

    1 is a perfect critic, 0 one as good as a constant, below 0 worse than a constant. A constant error does not
    show: see ``error_mean``.

    Args:
        values: predicted values, any shape; the dtypes of :func:`value_stats`.
        returns: of the same shape.
        masks, slice_ids, names, mask: as for :func:`pyrlstats.slice_stats`.

    Returns:
        Per slice, on the inputs' device, mergeable. Does not sync. Pairs with a NaN or infinite value or return are
        excluded and counted; NaN for a slice without pairs or whose returns are all equal.

    Raises:
        TypeError: not an array, or a dtype that is not accepted.
        ValueError: shapes, devices or names that do not fit.
    """
    pair = {"values": as_floats("values", values), "returns": as_floats("returns", returns)}
    arrays, given = prepared(pair, masks, slice_ids, mask, names)
    checked = given["names"]
    batch = gate(arrays["values"], arrays["returns"], given["masks"], given["slice_ids"], given["mask"], checked)
    xp = namespace(batch.logp)
    target = xp.asarray(batch.old_logp, dtype=xp.float64)
    error = target - xp.asarray(batch.logp, dtype=xp.float64)
    finite = xp.isfinite(error) & xp.isfinite(target)  # inf - inf is NaN
    target, error = (xp.where(finite, x, 0.0) for x in (target, error))
    inside = batch.base_mask != 0 if batch.base_mask is not None else xp.ones_like(finite)
    members, out_of_range = [inside] * len(checked), xp.zeros_like(finite.sum())
    if batch.masks is not None:
        members = [inside & (one != 0) for one in batch.masks]
    elif batch.slice_ids is not None:
        ids = xp.asarray(batch.slice_ids, dtype=xp.int64)
        beyond = ids >= len(checked)
        if str(batch.slice_ids.dtype).endswith("uint64"):
            beyond = beyond | (ids < 0)  # above 2^63 it turns negative
        members = [inside & (ids == index) for index in range(len(checked))]
        out_of_range = (inside & beyond).sum()
    rows = []
    for member in members:
        chosen = member & finite
        n, weight = chosen.sum(), xp.asarray(chosen, dtype=xp.float64)
        rows.append((n, (member & ~finite).sum(), *_moments(target, weight, n), *_moments(error, weight, n)))
    n, bad, mean_return, m2_return, mean_error, m2_error = (xp.stack(column) for column in zip(*rows, strict=True))
    return ExplainedVariance(checked, n, bad, mean_return, m2_return, mean_error, m2_error, out_of_range)


def _moments(x: Array, weight: Array, n: Array) -> tuple[Array, Array]:
    """Mean (0 where n is 0) and sum of squared deviations of the x of weight 1."""
    n = namespace(n).clip(n, 1, None)
    average = (x * weight).sum() / n
    deviation = (x - average) * weight
    # the second term corrects the rounding of the mean
    return average, (deviation**2).sum() - deviation.sum() ** 2 / n
