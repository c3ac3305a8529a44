"""Explained variance of a critic's predictions, slice by slice, from co-moments that do not cancel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyrlstats._inputs import Masks, _as_array, _broadcast, _masks_by_name, _on_common_ground, resolve_names
from pyrlstats.state import Array, namespace
from pyrlstats.values.stats import _floats, _naming


@dataclass(frozen=True, eq=False)
class ExplainedVariance(Mapping[str, Any]):
    """How much of the returns' variance the predicted values explain, slice by slice; mergeable.

    Attributes:
        names: the slices, in order.
        n: int64 (S,), pairs with both finite.
        n_non_finite: int64 (S,), pairs with a NaN or infinite value or return: excluded.
        mean_return, mean_error: float64 (S,), means of the returns and of ``return - value``; 0 where n is 0.
        m2_return, m2_error: float64 (S,), sums of squared deviations from those means.
    """

    names: tuple[str, ...]
    n: Array
    n_non_finite: Array
    mean_return: Array
    m2_return: Array
    mean_error: Array
    m2_error: Array

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
            ValueError: other slices.
        """
        if self.names != other.names:
            raise ValueError(f"explained variances of different slices cannot be merged: {self.names}, {other.names}")
        moments: dict[str, Array] = {}
        for what in ("return", "error"):
            mean_name, m2_name = f"mean_{what}", f"m2_{what}"
            moments[mean_name], moments[m2_name] = _pooled(
                (self.n, getattr(self, mean_name), getattr(self, m2_name)),
                (other.n, getattr(other, mean_name), getattr(other, m2_name)),
            )
        return ExplainedVariance(self.names, self.n + other.n, self.n_non_finite + other.n_non_finite, **moments)

    def __add__(self, other: object) -> ExplainedVariance:
        return self.merge(other) if isinstance(other, ExplainedVariance) else NotImplemented

    def __radd__(self, other: object) -> ExplainedVariance:
        return self if other == 0 else NotImplemented  # sum() starts at 0

    def all_reduce(self, group: Any = None) -> ExplainedVariance:
        """The pooled one of all ranks: two SUM collectives of fixed size, no sync. Torch inputs only.

        Every rank of the group must call it, with or without pairs, with the same slices.
        """
        import torch
        import torch.distributed as dist

        n = self.n.to(torch.float64)
        first = torch.stack((n, self.n_non_finite.to(torch.float64), n * self.mean_return, n * self.mean_error))
        dist.all_reduce(first, group=group)
        total = first[0].clamp(min=1.0)
        means = first[2:] / total
        own = torch.stack((self.mean_return, self.mean_error))
        second = torch.stack((self.m2_return, self.m2_error)) + n * (own - means) ** 2
        dist.all_reduce(second, group=group)
        counts = first[:2].to(torch.int64)
        return ExplainedVariance(self.names, counts[0], counts[1], means[0], second[0], means[1], second[1])

    def to_dict(self, prefix: str = "") -> dict[str, float]:
        """``{prefix + slice + "/" + statistic: value}`` as Python numbers. One copy to the host: syncs on a GPU."""
        keys = ("explained_variance", "error_mean", "error_std", "return_std", "n", "n_non_finite")
        xp = namespace(self.n)
        table = xp.stack([xp.asarray(getattr(self, key), dtype=xp.float64) for key in keys]).T.tolist()
        return {
            f"{prefix}{name}/{key}": int(value) if key.startswith("n") else value
            for name, row in zip(self.names, table, strict=True)
            for key, value in zip(keys, row, strict=True)
        }

    def __repr__(self) -> str:
        return f"ExplainedVariance({self.to_dict()})"


def _pooled(one: tuple[Array, Array, Array], two: tuple[Array, Array, Array]) -> tuple[Array, Array]:
    """Mean and sum of squared deviations of two parts given as (n, mean, m2)."""
    (n_one, mean_one, m2_one), (n_two, mean_two, m2_two) = one, two
    xp = namespace(n_one)
    # float64 by hand: torch divides integers in float32
    share = xp.asarray(n_two, dtype=xp.float64) / xp.clip(n_one + n_two, 1, None)
    gap = mean_two - mean_one
    return mean_one + gap * share, m2_one + m2_two + gap**2 * n_one * share


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
        values: predicted values, any shape; float32, bfloat16, float16 or float64.
        returns: of the same shape.
        masks, slice_ids, names, mask: as for :func:`pyrlstats.slice_stats`.

    Returns:
        Per slice, on the inputs' device, mergeable. Does not sync. Pairs with a NaN or infinite value or return are
        excluded and counted; NaN for a slice without pairs or whose returns are all equal.

    Raises:
        TypeError: not an array, or a dtype that is not accepted.
        ValueError: shapes, devices or names that do not fit.
    """
    arrays = {"values": _floats("values", values), "returns": _floats("returns", returns)}
    shape = tuple(arrays["values"].shape)
    if tuple(arrays["returns"].shape) != shape:
        raise ValueError(f"returns must have values' shape {shape}, got {tuple(arrays['returns'].shape)}")
    checked = resolve_names(masks, slice_ids, names)
    own = {}
    if masks is not None:
        own = dict(zip(checked, _masks_by_name(masks, checked), strict=True))
        arrays |= {f"mask of slice {name!r}": _as_array(name, one) for name, one in own.items()}
    if slice_ids is not None:
        arrays["slice_ids"] = _as_array("slice_ids", slice_ids)
    elif masks is None and len(checked) != 1:
        raise ValueError(f"masks are needed for the slices {list(checked)}: give a mapping name -> mask")
    if mask is not None:
        arrays["mask"] = _as_array("mask", mask)
    arrays = _on_common_ground(arrays)
    with _naming("values"):
        arrays = {key: _broadcast(key, array, shape) for key, array in arrays.items()}
    xp = namespace(arrays["values"])
    target = xp.asarray(arrays["returns"], dtype=xp.float64)
    error = target - xp.asarray(arrays["values"], dtype=xp.float64)
    finite = xp.isfinite(error) & xp.isfinite(target)  # inf - inf is NaN
    target, error = (xp.where(finite, x, 0.0) for x in (target, error))
    inside = arrays["mask"] != 0 if mask is not None else xp.ones_like(finite)
    rows = []
    for index, name in enumerate(checked):
        member = inside
        if own:
            member = inside & (arrays[f"mask of slice {name!r}"] != 0)
        elif slice_ids is not None:
            member = inside & (arrays["slice_ids"] == index)
        chosen = member & finite
        n, weight = chosen.sum(), xp.asarray(chosen, dtype=xp.float64)
        rows.append((n, (member & ~finite).sum(), *_moments(target, weight, n), *_moments(error, weight, n)))
    n, bad, mean_return, m2_return, mean_error, m2_error = (xp.stack(column) for column in zip(*rows, strict=True))
    return ExplainedVariance(checked, n, bad, mean_return, m2_return, mean_error, m2_error)


def _moments(x: Array, weight: Array, n: Array) -> tuple[Array, Array]:
    """Mean (0 where n is 0) and sum of squared deviations of the x of weight 1."""
    n = namespace(n).clip(n, 1, None)
    average = (x * weight).sum() / n
    deviation = (x - average) * weight
    # the second term corrects the rounding of the mean
    return average, (deviation**2).sum() - deviation.sum() ** 2 / n
