"""Every scalar statistic: against the reference on the tokens themselves, and against closed forms.

The state comes from the machine's default backend; that backends agree on it is the conformance table's business.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch

import pyrlstats
from pyrlstats import reference
from pyrlstats.slice_stats import SCALARS

COUNTS = ("n_tokens", "n_finite", "n_nan", "n_pos_inf", "n_neg_inf", "n_zero")
EXTREMA = ("log_ratio_min", "log_ratio_max")
EXACT_SHARES = ("zero_fraction", "clip_fraction_low", "clip_fraction_high", "clip_fraction")
NORMAL = np.array([NormalDist().inv_cdf((index + 0.5) / 20_000) for index in range(20_000)])


def stats_of(x: Any, **options: Any) -> Any:
    """The only slice of the tokens whose log-ratios are x, a NumPy array or list."""
    x = np.asarray(x, np.float32)
    return pyrlstats.slice_stats(x, np.zeros_like(x), **options)["all"]


def as_floats(view: Any) -> dict[str, float]:
    return {name: float(getattr(view, name)) for name in SCALARS}


def bounds(truth: dict[str, float], x: np.ndarray) -> dict[str, float]:
    """Largest error allowed for each statistic that is not exact."""
    finite = x[np.isfinite(x)].astype(np.float64)
    mean_square, mean_abs = np.mean(finite**2), np.mean(np.abs(finite))

    chi2_error = 1e-6 * (truth["chi2"] + (0.0 if np.abs(finite).max() < 0.5 else 1.0))
    relative = {name: 5e-7 * abs(value) for name, value in truth.items()}
    absolute = {
        "log_ratio_mean": 1e-12 * mean_abs,
        "kl_k1": 1e-12 * mean_abs,
        # the variance is a difference of mean squares, each to 1e-12
        "log_ratio_std": min(math.sqrt(2e-12 * mean_square), 2e-12 * mean_square / max(truth["log_ratio_std"], 1e-300)),
        "chi2": chi2_error,
        "renyi2": chi2_error / (1.0 + truth["chi2"]),
        "ratio_std": truth["ratio_mean"] * chi2_error / max(math.sqrt(truth["chi2"]), 1e-3),
    }
    return {name: relative[name] + absolute.get(name, 0.0) for name in truth}


DATA: dict[str, Any] = {
    "mismatch": lambda rng: rng.normal(0, 1e-3, 4000),
    "tiny": lambda rng: rng.normal(0, 1e-5, 4000),
    "tinier": lambda rng: rng.normal(0, 1e-8, 4000),
    "off policy": lambda rng: rng.normal(-0.1, 0.4, 4000),
    "heavy tails": lambda rng: rng.standard_t(1.5, 4000) * 0.01,
    "decades": lambda rng: rng.normal(0, 1, 4000) * 10.0 ** rng.uniform(-8, 1.5, 4000),
    "far": lambda rng: rng.normal(0, 5, 4000),
    "far below": lambda rng: rng.normal(-300, 1, 4000),
    "far above": lambda rng: rng.normal(5000, 1, 4000),
    "squares of weights overflow": lambda rng: rng.normal(380, 1, 4000),
    "just above the change of formula": lambda rng: rng.normal(23, 1, 4000),
    "small weights": lambda rng: rng.normal(-1, 0.2, 4000),
    "smaller weights": lambda rng: rng.normal(-6, 0.01, 4000),
    "offset": lambda rng: 3.0 + rng.normal(0, 1e-2, 4000),
    "near offset": lambda rng: 0.25 + rng.normal(0, 1e-3, 4000),
    "one token": lambda rng: rng.normal(0, 1, 1),
    "two tokens": lambda rng: rng.normal(0, 1, 2),
    "zeros": lambda rng: np.zeros(50),
    "equal": lambda rng: np.full(50, 0.1),
    "equal and large": lambda rng: np.full(50, 5000.0),
    "equal and low": lambda rng: np.full(50, -300.0),
    "one outlier": lambda rng: np.append(rng.normal(0, 1e-3, 9999), 30.0),
    "with bad tokens": lambda rng: np.append(rng.normal(0, 0.1, 900), [np.nan, np.inf, np.inf, -np.inf, 0.0, -0.0]),
    "bfloat16 steps": lambda rng: rng.integers(-4, 5, 4000) * 2.0**-7,
}


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("data", DATA)
def test_every_statistic_against_the_reference(data, kind, rng):
    x = np.asarray(DATA[data](rng), np.float32)
    truth = reference.statistics(x)
    if kind == "torch":
        got = as_floats(pyrlstats.slice_stats(torch.from_numpy(x), torch.zeros(len(x)))["all"])
    else:
        got = as_floats(stats_of(x))
    assert truth.keys() - got.keys() <= {"perplexity_ess_fraction"}
    assert got.keys() <= truth.keys()
    allowed = bounds(truth, x)
    wrong = {}
    for name, value in got.items():
        exact = name in COUNTS or name in EXTREMA or value == truth[name]
        if value != truth[name] if exact else not abs(value - truth[name]) <= allowed[name]:
            wrong[name] = (value, truth[name], allowed[name])
    assert not wrong, f"(got, wanted, allowed): {wrong}"


@pytest.mark.parametrize("data", DATA)
def test_shares_are_ratios_of_counts(data, rng):
    x = np.asarray(DATA[data](rng), np.float32)
    finite = x[np.isfinite(x)]
    low, high = np.float32(np.log1p(-0.1)), np.float32(np.log1p(0.3))
    view = stats_of(x, clip=(0.1, 0.3))
    assert float(view.zero_fraction) == np.count_nonzero(finite == 0) / len(finite)
    assert float(view.clip_fraction_low) == np.count_nonzero(finite < low) / len(finite)
    assert float(view.clip_fraction_high) == np.count_nonzero(finite > high) / len(finite)
    assert float(view.clip_fraction) == np.count_nonzero((finite < low) | (finite > high)) / len(finite)


def test_numpy_and_torch_agree_to_the_last_digits(rng):
    """The same formulas in two libraries."""
    for data in DATA.values():
        x = np.asarray(data(rng), np.float32)
        left, right = (
            as_floats(stats_of(x)),
            as_floats(pyrlstats.slice_stats(torch.from_numpy(x), torch.zeros(len(x)))["all"]),
        )
        for name, value in left.items():
            # chi2 near 0 is a difference: to the digits of its terms
            assert value == pytest.approx(
                right[name], rel=1e-12, abs=1e-14 if name in ("chi2", "renyi2") else 1e-300
            ), name


def test_types():
    """Counts are int64, everything else float64; 0-d."""
    for x in (np.float32([0.5]), torch.tensor([0.5]), np.zeros(0, np.float32), torch.zeros(0)):
        zeros = x * 0
        view = pyrlstats.slice_stats(x, zeros)["all"]
        for name in SCALARS:
            value = getattr(view, name)
            assert str(value.dtype).removeprefix("torch.") == ("int64" if name in COUNTS else "float64"), name
            assert tuple(value.shape) == ()


@pytest.mark.parametrize("x", [[], [math.nan], [math.inf, -math.inf, math.nan]])
def test_a_slice_without_finite_tokens(x):
    """Counts and NaN: never 0, never an exception, never a warning."""
    for view in (stats_of(x), pyrlstats.slice_stats(torch.tensor(x, dtype=torch.float32), torch.zeros(len(x)))["all"]):
        got = as_floats(view)
        assert got["n_tokens"] == len(x)
        assert got["n_finite"] == got["n_zero"] == 0
        assert all(math.isnan(value) for name, value in got.items() if name not in COUNTS), got
    wanted = reference.statistics(np.float32(x))
    assert all(math.isnan(value) for name, value in wanted.items() if name not in COUNTS)


def test_an_empty_slice_beside_a_full_one(rng):
    x = rng.normal(0, 1, 100).astype(np.float32)
    masks = {"none": np.zeros(100, bool), "every": np.ones(100, bool)}
    stats = pyrlstats.slice_stats(x, np.zeros_like(x), masks)
    assert as_floats(stats["every"]) == as_floats(stats_of(x))
    empty = as_floats(stats["none"])
    assert all(value == 0 if name in COUNTS else math.isnan(value) for name, value in empty.items())


@pytest.mark.parametrize(
    "value", [0.0, 1e-30, 1e-5, 0.1, -0.3, 0.5, -2.0, 20.0, 22.5, 88.0, -88.0, -300.0, 5000.0, 3e38]
)
@pytest.mark.parametrize("n", [1, 2, 7, 1000, 4097])
def test_constant_data(value, n):
    """No spread, whatever the value: exactly none, not nearly."""
    for sign in (1.0, -1.0):
        view = stats_of(np.full(n, sign * value))
        assert float(view.chi2) == 0.0
        assert float(view.renyi2) == 0.0
        assert float(view.ess_fraction) == 1.0
        assert float(view.ess) == n
        assert float(view.log_ratio_std) == 0.0
        assert float(view.max_weight_ess_fraction) == pytest.approx(1.0, rel=5e-7)
        assert float(view.ratio_std) == 0.0, "also where the ratio itself overflows"
        assert float(view.log_ratio_mean) == pytest.approx(sign * np.float64(np.float32(value)), rel=1e-12)


@pytest.mark.parametrize(
    "shift", [0.0, 1e-4, 0.3, 0.5, 2.0, 21.0, 22.0, 23.0, -1.0, -5.0, -40.0, 700.0, -300.0, 5000.0]
)
def test_scale_free_statistics_do_not_see_a_constant(shift, rng):
    """Adding a constant to every x changes nothing: x on a grid of 2^-11, so that float32 adds it exactly."""
    shift = round(shift * 2048) / 2048
    x = np.round(rng.normal(0, 0.7, 3000) * 2048) / 2048
    here, there = stats_of(x), stats_of(x + shift)
    assert np.array_equal(np.float32(x + shift), x + shift)
    for name in ("ess", "ess_fraction", "max_weight_ess_fraction", "chi2", "renyi2"):
        assert float(getattr(there, name)) == pytest.approx(float(getattr(here, name)), rel=2e-6), name
    assert float(there.log_ratio_std) == pytest.approx(np.std(x), rel=1e-6)


def test_lognormal_weights():
    """For x ~ N(mu, s^2): 1 + chi2 = exp(s^2), mean w = exp(mu + s^2 / 2), KL(old, new) estimates as known."""
    for s, mu, tolerance in (
        (1e-5, 0.0, 1e-4),
        (1e-3, 0.0, 1e-4),
        (0.3, 0.0, 2e-3),
        (0.3, 7.0, 2e-3),
        (0.7, -9.0, 1e-2),
    ):
        view = stats_of(mu + s * NORMAL)
        # float32 rounds x at mu; NORMAL is a finite sample of quantiles
        assert float(view.chi2) == pytest.approx(math.expm1(s**2), rel=max(tolerance, 1e-3))
        assert float(view.ess_fraction) == pytest.approx(math.exp(-(s**2)), rel=tolerance)
        assert float(view.renyi2) == pytest.approx(s**2, rel=max(tolerance, 1e-3))
        assert float(view.ratio_mean) == pytest.approx(math.exp(mu + s**2 / 2), rel=tolerance)
        assert float(view.ratio_std) == pytest.approx(
            math.exp(mu + s**2 / 2) * math.sqrt(math.expm1(s**2)), rel=max(tolerance, 1e-3)
        )
        assert float(view.log_ratio_std) == pytest.approx(s, rel=1e-3)


def test_two_kinds_of_tokens():
    """m tokens at 0 and one at a: sums that anybody can write down."""
    for m in (1, 9, 9999):
        for a in (1e-4, 0.2, 1.0, 10.0, 30.0, 300.0, -1.0, -30.0, -300.0):
            a = float(np.float32(a))
            view = stats_of([0.0] * m + [a])
            w, n = math.exp(a), m + 1
            ess = (m + w) ** 2 / (m + w * w)
            assert float(view.ess) == pytest.approx(ess, rel=1e-6)
            assert float(view.chi2) == pytest.approx(m * (w - 1) ** 2 / (m + w) ** 2, rel=1e-6, abs=1e-300)
            assert float(view.max_weight_ess_fraction) == pytest.approx((m + w) / max(1.0, w) / n, rel=1e-6)
            assert float(view.ratio_mean) == pytest.approx((m + w) / n, rel=1e-6)
            assert float(view.ratio_std) == pytest.approx(math.sqrt(m) * abs(w - 1) / n, rel=1e-6)
            assert float(view.ratio_max) == pytest.approx(max(1.0, w), rel=1e-12)
            assert float(view.ratio_min) == pytest.approx(min(1.0, w), rel=1e-12)
            assert float(view.kl_k1) == pytest.approx(-a / n, rel=1e-12)
            assert float(view.kl_k2) == pytest.approx(a * a / 2 / n, rel=1e-12)
            assert float(view.kl_k3) == pytest.approx(float(reference.k3(np.float64(a))) / n, rel=1e-6)
            assert float(view.log_ratio_std) == pytest.approx(abs(a) * math.sqrt(m) / n, rel=1e-9)
            assert float(view.zero_fraction) == m / n


def test_weights_neither_overflow_nor_vanish():
    """All x = 5000; all -300; both at once."""
    high, low, both = stats_of([5000.0] * 10), stats_of([-300.0] * 10), stats_of([5000.0] + [-300.0] * 9)
    assert float(high.ratio_mean) == float(high.ratio_max) == float(high.kl_k3) == math.inf
    assert float(high.ess) == float(low.ess) == 10.0
    assert float(low.ratio_mean) == pytest.approx(math.exp(-300.0), rel=1e-6)
    assert float(low.kl_k3) == pytest.approx(299.0, rel=1e-6)
    assert float(both.ess) == pytest.approx(1.0, rel=1e-12)
    assert float(both.chi2) == pytest.approx(9.0, rel=1e-12)
    assert float(both.max_weight_ess_fraction) == pytest.approx(0.1, rel=5e-7)
    assert float(both.ratio_min) == pytest.approx(math.exp(-300.0), rel=1e-12)
    extreme = stats_of([3.4e38, -3.4e38])
    assert float(extreme.ess) == pytest.approx(1.0)
    assert float(extreme.ratio_mean) == math.inf
    assert float(extreme.ratio_min) == 0.0
    assert float(extreme.log_ratio_mean) == 0.0
    assert float(extreme.log_ratio_std) == pytest.approx(float(np.float32(3.4e38)), rel=1e-12)


def test_tiny_log_ratios_keep_their_digits(rng):
    """sigma = 1e-5: chi2 is the variance, k3 half the mean square, to first order; float32 weights are all 1."""
    for sigma in (1e-3, 1e-5, 1e-7):
        x = rng.normal(0, sigma, 20_000).astype(np.float32)
        wide = x.astype(np.float64)
        view = stats_of(x)
        k3 = math.fsum(value * value / 2 + value**3 / 6 + value**4 / 24 for value in wide.tolist()) / len(x)
        assert float(view.kl_k3) == pytest.approx(k3, rel=5e-7)
        w1 = np.expm1(wide)
        chi2 = np.var(w1) / (1 + w1.mean()) ** 2
        assert float(view.chi2) == pytest.approx(chi2, rel=1e-6)
        assert float(view.ratio_std) == pytest.approx(np.std(w1), rel=1e-6)
        assert float(view.log_ratio_std) == pytest.approx(np.std(wide), rel=1e-9)
        assert float(view.kl_k2) == pytest.approx(np.mean(wide**2) / 2, rel=1e-12)


def test_identities(rng):
    """What one statistic says about another, on any data."""
    for data in DATA.values():
        view = stats_of(data(rng))
        value = as_floats(view)
        n = value["n_finite"]
        assert value["n_tokens"] == n + value["n_nan"] + value["n_pos_inf"] + value["n_neg_inf"]
        assert value["kl_k1"] == -value["log_ratio_mean"]
        assert value["kl_k3"] >= 0.0
        assert value["ess"] == pytest.approx(value["ess_fraction"] * n)
        assert value["ess_fraction"] == pytest.approx(1.0 / (1.0 + value["chi2"]))
        assert value["renyi2"] == pytest.approx(math.log1p(value["chi2"]))
        assert 1.0 - 1e-9 <= value["ess"] <= n
        assert value["ess_fraction"] >= value["max_weight_ess_fraction"] ** 2 * (1 - 2e-6)
        assert value["ess_fraction"] >= value["max_weight_ess_fraction"] / n * (1 - 2e-6)
        assert 1.0 / n * (1 - 1e-6) <= value["max_weight_ess_fraction"] <= 1.0 + 1e-6
        assert value["clip_fraction"] == pytest.approx(value["clip_fraction_low"] + value["clip_fraction_high"])
        assert value["ratio_min"] * (1 - 1e-6) <= value["ratio_mean"] <= value["ratio_max"] * (1 + 1e-6)
        assert value["log_ratio_min"] <= value["log_ratio_mean"] + 1e-12 * abs(value["log_ratio_mean"])
        assert abs(value["log_ratio_mean"]) <= value["log_ratio_abs_mean"] * (1 + 1e-6)


def test_std_is_without_cancellation():
    """A constant far larger than the spread: x = offset + steps of 2^-10, which float32 holds."""
    for offset in (0.25, 4.0, 64.0, 1024.0):
        x = offset + np.arange(-50, 51) * 2.0**-10
        assert float(stats_of(x).log_ratio_std) == pytest.approx(np.std(x), rel=1e-6)


def test_statistics_are_on_the_pooled_tokens_of_every_slice_alone(rng):
    """Vectorised over slices: each column is what the slice alone would give."""
    x = rng.normal(0, 1, (6, 500)) * 10.0 ** np.arange(-5, 1)[:, None]
    x = x.astype(np.float32)
    stats = pyrlstats.slice_stats(x, np.zeros_like(x), slice_ids=np.arange(6)[:, None], names=list("abcdef"))
    for index, name in enumerate("abcdef"):
        alone = as_floats(stats_of(x[index]))
        for statistic, value in as_floats(stats[name]).items():
            assert value == pytest.approx(alone[statistic], rel=1e-6, abs=1e-12), (name, statistic)


def test_perplexity_of_the_reference():
    """exp(H) / n of the normalised weights; the reference alone defines it so far."""

    def fraction(x: Any) -> float:
        return reference.statistics(np.float32(x))["perplexity_ess_fraction"]

    assert fraction([0.3] * 7) == pytest.approx(1.0)
    assert fraction([500.0] * 7) == pytest.approx(1.0)
    assert fraction([0.0] * 9 + [800.0]) == pytest.approx(0.1)
    assert fraction([2.5]) == pytest.approx(1.0)
    a = float(np.float32(1.7))
    p, q = 1 / (1 + math.exp(a)), math.exp(a) / (1 + math.exp(a))
    assert fraction([0.0, a]) == pytest.approx(math.exp(-p * math.log(p) - q * math.log(q)) / 2)
    assert fraction([-300.0, a - 300.0]) == pytest.approx(fraction([0.0, a]), rel=1e-4)
    # lognormal weights: log n - H = KL(self-normalised, uniform) = s^2 / 2
    assert fraction(0.5 * NORMAL) == pytest.approx(math.exp(-0.125), rel=2e-3)
    assert math.isnan(fraction([]))


def test_reference_k3():
    """Its series and its difference meet at abs(x) = 1, and the series is right far below."""
    for value in (1e-12, 1e-6, 1e-3, 0.1, 0.9999999, 1.0000001, 5.0):
        for x in (value, -value):
            exact = math.fsum(x**power / math.factorial(power) for power in range(2, 40))
            assert float(reference.k3(np.float64(x))) == pytest.approx(exact, rel=1e-13)


def test_reference_log_ratio():
    half = np.float16([1.0009765625])
    assert reference.log_ratio(half, np.float16([1e-4]))[0] == np.float32(half[0]) - np.float32(np.float16(1e-4))
    assert reference.log_ratio(np.float64([1e300]), np.float64([0.0]))[0] == np.inf
    assert reference.log_ratio(np.float32([-np.inf]), np.float32([-np.inf])).dtype == np.float32
