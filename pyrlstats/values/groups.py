"""Spread of the rewards within the groups of answers to one prompt, as GRPO-style training uses them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from pyrlstats._inputs import _INTEGERS, _as_array, _check_dtype, _on_common_ground, device_of
from pyrlstats._sequences import arange
from pyrlstats.state import Array, namespace
from pyrlstats.values.arguments import as_floats
from pyrlstats.values.pooling import Poolable, pooled


@dataclass(frozen=True, eq=False)
class GroupRewardStats(Poolable):
    """Rewards within the groups of one prompt (GRPO, RLOO, DAPO): sums, so that batches add up.

    A group of which all rewards are equal has advantage 0 everywhere and teaches nothing. Fractions are over the
    groups of at least two finite rewards, ``n_groups``.

    Attributes, 0-d, counts int64 and sums float64:
        low, high: numbers, the rewards of failure and of success.
        n_rewards: finite rewards, in groups of any size.
        n_non_finite: NaN and infinite rewards: excluded.
        n_groups: groups of at least two finite rewards.
        n_single: groups of one finite reward, which have no spread: in no fraction.
        n_zero_variance: groups whose rewards are all equal, exactly.
        n_all_low, n_all_high: groups whose rewards all equal ``low``, or ``high``.
        n_in_groups: finite rewards in the ``n_groups`` groups.
        sum_std: sum over groups of the sample standard deviation (n - 1), by which GRPO divides.
        sum_within: sum over groups of squared deviations from the group's mean.
        mean_of_means, m2_of_means: mean over the groups of their mean reward, and sum of squared deviations from it.
    """

    low: float
    high: float
    n_rewards: Array
    n_non_finite: Array
    n_groups: Array
    n_single: Array
    n_zero_variance: Array
    n_all_low: Array
    n_all_high: Array
    n_in_groups: Array
    sum_std: Array
    sum_within: Array
    mean_of_means: Array
    m2_of_means: Array

    def _over(self, total: Array, n: Array) -> Array:
        xp = namespace(self.n_groups)
        return total / xp.where(n > 0, xp.asarray(n, dtype=xp.float64), float("nan"))

    @property
    def zero_variance_fraction(self) -> Array:
        """Share of groups whose rewards are all equal."""
        return self._over(self.n_zero_variance, self.n_groups)

    @property
    def all_low_fraction(self) -> Array:
        """Share of groups that all failed: every reward equals ``low``."""
        return self._over(self.n_all_low, self.n_groups)

    @property
    def all_high_fraction(self) -> Array:
        """Share of groups that all succeeded: every reward equals ``high``."""
        return self._over(self.n_all_high, self.n_groups)

    @property
    def within_group_std(self) -> Array:
        """sqrt(sum of squared deviations / (rewards - groups)): the pooled sample standard deviation."""
        return namespace(self.n_groups).sqrt(self._over(self.sum_within, self.n_in_groups - self.n_groups))

    @property
    def group_std_mean(self) -> Array:
        """Mean over groups of the sample standard deviation, 0 of zero-variance groups included."""
        return self._over(self.sum_std, self.n_groups)

    @property
    def group_mean(self) -> Array:
        """Mean over groups of their mean reward."""
        return namespace(self.n_groups).where(self.n_groups > 0, self.mean_of_means, float("nan"))

    @property
    def between_group_std(self) -> Array:
        """Population standard deviation over groups of their mean reward: how much prompts differ in difficulty."""
        return namespace(self.n_groups).sqrt(self._over(self.m2_of_means, self.n_groups))

    def merge(self, other: GroupRewardStats) -> GroupRewardStats:
        """The same of the groups of both. A group must lie in one of them whole. Does not sync.

        Raises:
            TypeError: something else than GroupRewardStats.
            ValueError: another ``low`` or ``high``, or tensors on different devices.
        """
        mine, theirs = self._with(other)
        makes = [f"low={one.low:g} and high={one.high:g}" for one in (mine, theirs)]
        if (mine.low, mine.high) != (theirs.low, theirs.high):
            raise ValueError(f"groups with {makes[0]} and with {makes[1]} cannot be merged: make both with the same")
        names = [field.name for field in fields(self)]
        added = {name: getattr(mine, name) + getattr(theirs, name) for name in names}
        added |= {"low": mine.low, "high": mine.high}
        added["mean_of_means"], added["m2_of_means"] = pooled(
            (mine.n_groups, mine.mean_of_means, mine.m2_of_means),
            (theirs.n_groups, theirs.mean_of_means, theirs.m2_of_means),
        )
        return GroupRewardStats(**added)

    def to_dict(self, prefix: str = "") -> dict[str, float]:
        """``{prefix + statistic: value}`` as Python numbers. One copy to the host: syncs on a GPU."""
        counts = ("n_rewards", "n_non_finite", "n_groups", "n_single", "n_zero_variance", "n_all_low", "n_all_high")
        shares = ("zero_variance_fraction", "all_low_fraction", "all_high_fraction")
        spreads = ("within_group_std", "group_std_mean", "group_mean", "between_group_std")
        keys = (*counts, *shares, *spreads)
        xp = namespace(self.n_groups)
        row = xp.stack([xp.asarray(getattr(self, key), dtype=xp.float64) for key in keys]).tolist()
        return {prefix + key: int(value) if key in counts else value for key, value in zip(keys, row, strict=True)}

    def __repr__(self) -> str:
        return f"GroupRewardStats({self.to_dict()})"


def group_reward_stats(
    rewards: Any,
    group_ids: Any = None,
    *,
    group_size: int | None = None,
    low: float = 0.0,
    high: float = 1.0,
) -> GroupRewardStats:
    """Spread of the rewards within the groups of answers to one prompt.

    Args:
        rewards: one a trajectory: ``(G, K)``, a group a row; or any shape with ``group_ids`` or ``group_size``.
            Floats, integers or bool.
        group_ids: of rewards' shape: any integers or bool, or strings in a NumPy array or a list; equal = one group.
        group_size: rewards in row-major order form groups of so many.
        low, high: the rewards of failure and of success.

    Returns:
        Counts and sums, 0-d on the rewards' device (NumPy in, NumPy out), mergeable. Does not sync, and allocates
        by the number of rewards only (string ids are compared on the host and uploaded).

    Raises:
        TypeError: not an array, or a dtype that is not accepted.
        ValueError: both or neither way of grouping, a size that does not divide the rewards, or shapes that differ.
    """
    if group_ids is not None and group_size is not None:
        raise ValueError("group_ids and group_size exclude each other: give one of them")
    arrays = {"rewards": as_floats("rewards", rewards)}
    if group_ids is not None:
        arrays["group_ids"] = _group_ids(group_ids, arrays["rewards"])
    arrays = _on_common_ground(arrays)
    array = arrays["rewards"]
    xp = namespace(array)
    shape = tuple(array.shape)
    count = int(np.prod(shape))
    if group_ids is None:
        size = group_size
        if size is None:
            if len(shape) != 2:
                raise ValueError(f"rewards must be (groups, rewards a group), got {shape}: or give group_ids")
            size = shape[1]
        elif size < 1 or count % size:
            raise ValueError(f"group_size must be at least 1 and divide the {count} rewards, got {size}")
        group = arange(count, array) // max(size, 1)
        flat = xp.asarray(array.reshape(-1), dtype=xp.float64)
    else:
        ids = arrays["group_ids"]
        if tuple(ids.shape) != shape:
            raise ValueError(f"group_ids must have rewards' shape {shape}, got {tuple(ids.shape)}")
        order = _stable_order(ids.reshape(-1))
        ordered = ids.reshape(-1)[order]
        begins = xp.concatenate((ordered[:1] != ordered[:1], ordered[1:] != ordered[:-1]))
        group = xp.cumsum(begins, -1)
        flat = xp.asarray(array.reshape(-1), dtype=xp.float64)[order]
    return _group_sums(flat, group, float(low), float(high))


def _group_sums(reward: Array, group: Array, low: float, high: float) -> GroupRewardStats:
    """From float64 (B,) rewards and int64 (B,) groups, each in [0, B)."""
    xp = namespace(reward)
    finite = xp.isfinite(reward)
    known = xp.where(finite, reward, 0.0)
    n = _per_group(finite * 1.0, group)
    safe = xp.clip(n, 1.0, None)
    means = _per_group(known, group) / safe
    deviation = xp.where(finite, reward - means[group], 0.0)
    m2 = _per_group(deviation**2, group)
    smallest = _smallest_of_group(known, finite, group)
    # compared, not by m2 == 0, which rounding of the mean would spoil
    equal = _per_group((finite & (reward == smallest[group])) * 1.0, group) == n
    m2 = xp.where(equal, 0.0, m2)
    real = n > 1.0
    n_groups = real.sum()
    average = xp.where(real, means, 0.0).sum() / xp.clip(n_groups, 1, None)
    std = xp.sqrt(m2 / xp.clip(n - 1.0, 1.0, None))
    return GroupRewardStats(
        low=low,
        high=high,
        n_rewards=finite.sum(),
        n_non_finite=(~finite).sum(),
        n_groups=n_groups,
        n_single=(n == 1.0).sum(),
        n_zero_variance=(real & equal).sum(),
        n_all_low=(real & equal & (smallest == low)).sum(),
        n_all_high=(real & equal & (smallest == high)).sum(),
        n_in_groups=xp.asarray(xp.where(real, n, 0.0).sum(), dtype=xp.int64),
        sum_std=xp.where(real, std, 0.0).sum(),
        sum_within=xp.where(real, m2, 0.0).sum(),
        mean_of_means=average,
        m2_of_means=(xp.where(real, means - average, 0.0) ** 2).sum(),
    )


def _per_group(values: Array, group: Array) -> Array:
    """Sums by group, as many as there are values."""
    if isinstance(values, np.ndarray):
        return np.bincount(group, weights=values, minlength=values.size)[: values.size]
    return values.new_zeros(values.shape).index_add(0, group, values)


def _smallest_of_group(values: Array, finite: Array, group: Array) -> Array:
    """The smallest finite value of each group, 0 where there is none."""
    if isinstance(values, np.ndarray):
        smallest = np.full(values.shape, np.inf)
        np.minimum.at(smallest, group[finite], values[finite])
        return np.where(np.isfinite(smallest), smallest, 0.0)
    torch = namespace(values)
    masked = torch.where(finite, values, float("inf"))
    smallest = torch.full_like(values, float("inf")).scatter_reduce(0, group, masked, "amin")
    return torch.where(torch.isfinite(smallest), smallest, 0.0)


def _group_ids(group_ids: Any, like: Array) -> Array:
    if isinstance(group_ids, (list, tuple)):
        group_ids = np.asarray(group_ids)
    if isinstance(group_ids, np.ndarray) and group_ids.dtype.kind in "UO":
        codes = np.unique(group_ids.astype(str), return_inverse=True)[1].reshape(group_ids.shape)
        if isinstance(like, np.ndarray):
            return codes
        import torch

        return torch.from_numpy(codes).to(device_of(like), non_blocking=True)
    ids = _as_array("group_ids", group_ids)
    _check_dtype("group_ids", ids, ("bool", *_INTEGERS))
    # torch can do little with unsigned integers; a uint64 above 2^63 turns negative, which keeps ids apart
    xp = namespace(ids)
    return ids if xp is np else ids.to(xp.int64)


def _stable_order(ids: Array) -> Array:
    if isinstance(ids, np.ndarray):
        return np.argsort(ids, kind="stable")
    return ids.argsort(dim=-1, stable=True)
