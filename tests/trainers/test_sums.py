"""Raw sums through other people's reductions: pooled figures come out, where averages of averages do not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import pyrlstats
from pyrlstats import SliceStats
from pyrlstats.integrations.sums import as_floats, from_sums, sums_for_reduction

NAMES = ("all", "tool")
Parts = list[dict[str, Any]]


def micro_batches(sigma: float, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]:
    """Of very different sizes and spreads, one of them empty."""
    rng = torch.Generator().manual_seed(seed)
    batches = []
    for size, spread in ((3, 20.0), (900, 1.0), (0, 1.0), (40, 5.0)):
        x = torch.randn(size, generator=rng) * sigma * spread
        masks = {"all": torch.ones(size), "tool": torch.rand(size, generator=rng) < 0.4}
        batches.append((x - 1.0, torch.full_like(x, -1.0), masks))
    return batches


def pooled(batches: list[Any]) -> SliceStats:
    return pyrlstats.slice_stats(
        torch.cat([new for new, _, _ in batches]),
        torch.cat([old for _, old, _ in batches]),
        {name: torch.cat([masks[name] for _, _, masks in batches]) for name in NAMES},
    )


def added(parts: Parts) -> dict[str, Any]:
    return {key: sum(part[key] for part in parts) for key in parts[0]}


def averaged(parts: Parts) -> dict[str, Any]:
    return {key: value / len(parts) for key, value in added(parts).items()}


def in_float32(parts: Parts) -> dict[str, Any]:
    total = torch.stack([torch.tensor([float(value) for value in part.values()]) for part in parts]).sum(0)
    return dict(zip(parts[0], total, strict=True))


@pytest.mark.parametrize("sigma", [1e-5, 1e-2, 0.3])
@pytest.mark.parametrize(
    ("reduction", "parts", "tolerance"), [(added, 1.0, 1e-6), (averaged, 4.0, 1e-6), (in_float32, 1.0, 3e-6)]
)
def test_reduced_sums_give_the_statistics_of_one_pass(
    sigma: float, reduction: Callable[[Parts], dict[str, Any]], parts: float, tolerance: float
) -> None:
    batches = micro_batches(sigma)
    dictionaries = [sums_for_reduction(pyrlstats.slice_stats(*batch), "mismatch/") for batch in batches]
    assert len({tuple(one) for one in dictionaries}) == 1  # the same keys, also where the batch is empty
    got = from_sums({**reduction(dictionaries), "loss": 3.0}, "mismatch/", parts=parts)
    stats = pooled(batches)
    wanted = stats.to_dict("mismatch/")
    shared = [key for key in got if key in wanted]
    assert len(shared) == 2 * 22
    for key in shared:
        # float32 sums of w - 1 leave float32 digits of chi2, relative to the squares that are subtracted
        assert got[key] == pytest.approx(wanted[key], rel=tolerance, abs=tolerance * sigma), key
    for name in NAMES:
        for limit in (0.01, 0.1, 1.0):
            mass = got[f"mismatch/{name}/tail_mass_{limit:g}".replace(".", "_")]
            assert mass == pytest.approx(float(stats[name].tail_mass(limit)), rel=1e-6, abs=1e-9)


def test_averages_of_averages_do_not() -> None:
    batches = [batch for batch in micro_batches(0.3) if batch[0].numel()]
    wanted = pooled(batches).to_dict()
    each = [pyrlstats.slice_stats(*batch).to_dict() for batch in batches]
    for key in ("all/ess_fraction", "all/kl_k3", "all/clip_fraction"):
        mean_of_means = sum(one[key] for one in each) / len(each)
        assert abs(mean_of_means - wanted[key]) > 0.1 * wanted[key], key


def test_as_floats_is_one_dictionary_of_floats() -> None:
    stats = pyrlstats.slice_stats(*micro_batches(0.1)[1])
    sums = sums_for_reduction(stats, "p/")
    floats = as_floats(sums)
    assert list(floats) == list(sums)
    assert all(type(value) is float for value in floats.values())
    assert floats == {key: float(value) for key, value in sums.items()}
    assert as_floats({}) == {}


def test_numpy_states_and_extrema() -> None:
    x = np.array([-2.0, 0.0, 1.5, np.nan], np.float32)
    sums = sums_for_reduction(pyrlstats.slice_stats(x, np.zeros_like(x)), extrema=True)
    assert float(sums["all/log_ratio_max"]) == 1.5
    assert float(sums["all/log_ratio_min"]) == -2.0
    got = from_sums(as_floats(sums))
    assert got["all/n_nan"] == 1.0
    assert got["all/n_finite"] == 3.0
    assert got["all/log_ratio_max"] == 1.5
    assert got["all/tail_mass_1"] == pytest.approx(2 / 3)
    weights = np.exp(x[:3].astype(np.float64))
    assert got["all/ess_fraction"] == pytest.approx(weights.sum() ** 2 / (weights**2).sum() / 3, rel=1e-6)


def test_nothing_finite_is_nan_and_what_overflows_says_so() -> None:
    empty = from_sums(sums_for_reduction(pyrlstats.slice_stats(torch.zeros(0), torch.zeros(0)), extrema=True))
    assert empty["all/n_tokens"] == 0.0
    assert all(math.isnan(value) for key, value in empty.items() if "/n_" not in key)
    far = from_sums(sums_for_reduction(pyrlstats.slice_stats(torch.tensor([500.0, 0.0]), torch.zeros(2))))
    assert math.isnan(far["all/ess_fraction"])
    assert far["all/log_ratio_mean"] == 250.0
    low = from_sums(sums_for_reduction(pyrlstats.slice_stats(torch.full((4,), -300.0), torch.zeros(4))))
    assert math.isnan(low["all/chi2"])
    assert low["all/kl_k1"] == 300.0


def test_a_sum_that_a_logger_dropped_is_nan() -> None:
    sums = as_floats(sums_for_reduction(pyrlstats.slice_stats(*micro_batches(0.1)[1])))
    whole = from_sums(sums)
    got = from_sums({key: value for key, value in sums.items() if "w_less_1_squared" not in key})
    assert math.isnan(got["all/ess_fraction"])
    assert got["all/kl_k3"] == whole["all/kl_k3"]
    assert got.keys() == whole.keys()


def test_suffixes_and_other_metrics() -> None:
    stats = pyrlstats.slice_stats(*micro_batches(0.1)[1])
    plain = {f"pyrlstats/{key}/mean": value for key, value in sums_for_reduction(stats).items()}
    got = from_sums({**plain, "loss/mean": 1.0, "step": 3, "pyrlstats/odd": 1.0}, "pyrlstats/", suffix="/mean")
    assert got["pyrlstats/tool/kl_k3"] == pytest.approx(float(stats["tool"].kl_k3), rel=1e-9)
    assert not [key for key in got if "loss" in key or "odd" in key]
