"""The statistics behind the alarms: false alarms and delays at reduced size, with fixed seeds."""

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from source_tree import imported

from pyrlstats import slice_stats
from pyrlstats.monitor.drift import CLIP, Drift, fit, slope_se, theil_sen
from pyrlstats.monitor.growth import Limits, level, told
from pyrlstats.monitor.rules import builtin_rules
from pyrlstats.monitor.settings import Settings
from pyrlstats.monitor.signals import KEYS, Reference, against, least_noise, tail_to_mean, values_of
from pyrlstats.monitor.thresholds import HORIZON, RATES, RHO_EDGES, WARMUPS, threshold
from pyrlstats.slice_stats import SliceStats

family, single, together, tokens, simulated = (
    imported(f"benchmarks.detection.{name}") for name in ("family", "single", "together", "tokens", "noise")
)
ar1 = simulated.ar1
ROOT = Path(__file__).parent.parent


def noise(shape, steps, rho, sd=0.1, seed=0):
    return np.array(list(ar1(np.random.default_rng(seed), shape, steps, rho, sd)))


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.8])
def test_the_fit_finds_the_noise(rho):
    baseline = fit(noise((4000,), 200, rho) + 3.0)
    assert abs(baseline.location.mean() - 3.0) < 0.002
    assert abs(baseline.rho.mean() - max(rho, 0.03)) < 0.03  # never below 0
    assert abs(baseline.sd.mean() - 0.1) < 0.004
    # the location's error is what it is said to be
    said = 0.1 * np.sqrt((1 + rho) / (1 - rho) / 200)
    assert 0.9 < baseline.location.std() / said < 1.15


def test_the_fit_does_not_mind_spikes():
    values = noise((500,), 100, 0.5)
    spiked = values.copy()
    spiked[::25] += 5.0
    one, two = fit(values), fit(spiked)
    assert abs(two.location - one.location).mean() < 0.03
    assert abs(two.sd / one.sd - 1.0).mean() < 0.3


def test_signals_that_are_hardly_there_are_not_watched():
    values = noise((4,), 100, 0.0)
    values[:30, 1] = np.nan
    values[:10, 2] = -np.inf
    values[:, 3] = np.nan
    baseline = fit(values)
    assert baseline.watched.tolist() == [True, False, True, False]
    assert baseline.n.tolist() == [100, 70, 90, 0]
    drift = Drift(baseline)
    drift.update(np.array([1.0, 1.0, np.nan, 1.0]))
    assert (drift.deviation != 0.0).tolist() == [True, False, False, False]
    assert np.isfinite(drift.score()[[0, 2]]).all()


@pytest.mark.parametrize("rho", [0.0, 0.5])
def test_the_score_has_unit_noise(rho):
    values = noise((3000,), 500, rho)
    drift = Drift(fit(values[:200]))
    for row in values[200:]:
        drift.update(row)
    assert 0.93 < drift.score().std() < 1.1


def test_a_spike_moves_the_score_by_little():
    baseline = fit(noise((1,), 100, 0.0))
    drift = Drift(baseline)
    drift.update(baseline.location + 1000.0)
    assert drift.deviation[0] == pytest.approx(CLIP * baseline.sd[0] * drift.weight)


def test_the_level_is_a_median():
    values = np.array([[0.0, np.nan]] * 8 + [[1.0, np.nan]] * 6 + [[100.0, np.nan]])
    assert level(values)[0] == 1.0
    assert np.isnan(level(values)[1])


def test_the_tail_relative_to_the_mean_knows_no_level():
    def state_of(x):
        return slice_stats(x, np.zeros_like(x), {"some": x == x, "none": x == 0.0}).state

    rng = np.random.default_rng(0)
    before, now = (np.where(rng.random(4000) < 0.3, 0.0, 0.01 * rng.standard_t(5, 4000)).astype("f4") for _ in range(2))
    now[:40] *= 10.0
    state = state_of(now)
    reference = Reference(state_of(before))
    value, nothing = tail_to_mean(state, reference)
    assert np.isnan(nothing)
    sizes, now_sizes = (np.abs(x[x != 0.0]).astype("f8") for x in (before, now))
    far = np.quantile(sizes, 0.98, method="inverted_cdf") / sizes.mean() * now_sizes.mean()
    beyond = np.log(now_sizes / far)
    # half a bin for each token, and half a bin for where the tail begins
    bins = (beyond > -0.05).mean() * 2.0**-state.layout.mantissa_bits
    assert abs(value - np.maximum(beyond, 0.0).mean()) < bins < 0.2 * value
    assert value > 1.2 * tail_to_mean(state_of(before), reference)[0]
    # all tokens twice as large, or more of them 0: nothing that it sees
    assert tail_to_mean(state_of(2.0 * now), reference)[0] == pytest.approx(value, rel=1e-9)
    assert tail_to_mean(state_of(np.append(now, np.zeros(999, "f4"))), reference)[0] == pytest.approx(value, rel=1e-9)


def test_a_tail_that_outgrows_a_shrinking_mean_is_not_told():
    grew = np.zeros((2, 2 * len(KEYS)))
    relative, tail = len(KEYS) + KEYS.index("tail_to_mean"), len(KEYS) + KEYS.index("abs_log_ratio_p99_9")
    grew[:, relative] = 1.0
    grew[1, tail] = 0.2
    assert [np.flatnonzero(row).tolist() for row in told(grew)] == [[], [tail, relative]]
    grew[:, tail] = np.nan
    assert not told(grew).any()


def test_theil_sen():
    steps = np.arange(0, 60, 2)
    values = 0.3 + 0.01 * steps
    values[[3, 17]] = [50.0, np.nan]
    assert theil_sen(steps, values) == pytest.approx(0.01)
    assert np.isnan(theil_sen(steps[:1], values[:1]))
    rng = np.random.default_rng(0)
    found = [theil_sen(np.arange(60), rng.normal(0.0, 0.1, 60)) for _ in range(400)]
    assert 0.9 < np.std(found) / slope_se(np.arange(60), np.zeros(60), 0.1, 0.0) < 1.1


def test_thresholds_are_those_of_the_table_and_monotonic():
    assert threshold(0.05, 100, 0.5) == 4.2
    assert threshold(0.002, 400, 0.1) == 4.82
    rates = threshold(np.array([0.05, 0.03, 0.001, 1e-5]), 100, 0.5)
    assert (np.diff(rates) > 0).all()
    assert threshold(0.01, 20, 0.5) == threshold(0.01, 25, 0.5)
    assert threshold(0.01, 1000, 0.5) == threshold(0.01, 400, 0.5)
    assert threshold(0.01, 100, 0.5) > threshold(0.01, 150, 0.5) > threshold(0.01, 200, 0.5)
    assert len(RATES) == 8
    assert len(WARMUPS) == len(RHO_EDGES) + 1 == 5


def test_thresholds_keep_their_rate():
    rng = np.random.default_rng(5)
    stream = ar1(rng, (4000,), 100 + HORIZON, rng.uniform(0.0, 0.95, 4000), 0.1)
    drift = Drift(fit(np.array([next(stream) for _ in range(100)])))
    limit = threshold(0.05, drift.baseline.n, drift.baseline.rho)
    alarmed = np.zeros(4000, bool)
    for values in stream:
        alarmed |= drift.update(values) > limit
    assert 0.038 < alarmed.mean() < 0.062


@pytest.mark.parametrize("kind", ["AR(1), rho 0.5", "one-off spikes, tenfold", "resumed every 500 steps"])
def test_stationary_runs_raise_few_warnings_and_no_stop(kind):
    found = family.watch(family.STATIONARY[kind](np.random.default_rng(3), 120, 2000), Settings())
    assert (found.warning >= 0).mean() <= 0.05
    assert (found.stop >= 0).mean() <= 0.01


def test_rules_and_detectors_together_are_quiet_on_stationary_runs(monkeypatch):
    kinds = ("AR(1), rho 0.5", "rho from 0 to 0.9, sd from 2 % to 50 %", "cycles of 8 steps")
    monkeypatch.setattr(family, "STATIONARY", {kind: family.STATIONARY[kind] for kind in kinds})
    for row in together.false_alarms(12, 1000, batch=12):
        assert row["warnings"]["either"] <= 2 / 12
        assert row["stops"]["either"] == 0.0
        assert row["warnings"]["interval"][1] > 0.05


def test_rules_see_what_grows_in_a_simulated_run():
    values = np.array(list(family.STATIONARY["AR(1), rho 0.5"](np.random.default_rng(4), 1, 600)))[:, 0]
    quiet = np.zeros((600, len(together.SCALARS)))
    assert together.asked(builtin_rules(), together.table_of(values, quiet, np.zeros(60))) == {}
    values[:, 2 * len(KEYS)] += np.log1p(0.005) * np.clip(np.arange(600) - 200, 0, None)  # p99.9 of post_tool
    quiet[300:, list(together.SCALARS).index("entropy")] = -0.9
    said = together.asked(builtin_rules(), together.table_of(values, quiet, np.zeros(60)))
    assert set(said) == {"tail-growing", "tail-far-from-baseline", "one-slice-leaves-the-text", "entropy-collapse"}


def test_intervals_of_shares():
    assert together.wilson(0, 1000) == pytest.approx([0.0, 0.00383], abs=1e-5)
    assert together.wilson(50, 1000) == pytest.approx([0.0381, 0.0653], abs=1e-4)


def test_the_delays_of_one_signal():
    rng = np.random.default_rng(1)
    null, other = single.noise(rng, 3000), single.noise(rng, 1000)
    limit = np.quantile(single.ewma(null).max(1), 1.0 - single.RATE)
    for rate, most in single.TARGETS.items():
        outcome = single.outcome(single._first(single.ewma(other + single.ramp(rate)), limit))
        assert outcome["delay"] <= most
        assert outcome["found"] >= 0.98


def test_the_simulated_signals_are_those_of_the_monitor():
    states = []
    for state in tokens.states(2, 0.01, 0):
        states.append(state)
        if len(states) == 3:
            break
    reference = Reference(states[0])
    flat = [{**SliceStats(state).to_dict(), **against(state, reference)} for state in states]
    for state, signals in zip(states[1:], flat[1:], strict=True):
        simulated = tokens.signal_values(state, reference)
        np.testing.assert_allclose(simulated, values_of(signals, state.names), rtol=1e-12)
    values = np.array([tokens.signal_values(state, reference).reshape(2, -1) for state in states[1:]])
    noise_of_counts = tokens._counting_noise(values, states[1:])
    wanted = np.maximum(least_noise(flat[1:], states[0].names), 0.02).reshape(2, -1)
    np.testing.assert_allclose(noise_of_counts, wanted, rtol=1e-9)


def test_growth_of_few_tokens_is_found_while_the_global_mean_is_flat(monkeypatch):
    monkeypatch.setattr(tokens, "TOKENS", 10_000)
    runs = tokens.simulate(3, 0.005, 1)
    found = family.watch(iter(runs.values), Settings(), runs.least_sd)
    assert (found.warning > tokens.ONSET).all()
    assert (found.warning < tokens.ONSET + 90).all()
    # a monitor of the global mean KL, with all its false alarms spent on it alone, is silent by then
    global_kl = np.log(runs.kl)
    baseline = fit(global_kl[:, : tokens.WARMUP].T)
    limit = Limits.of(baseline, 0.03, 0.005).warning
    scores = single.ewma(global_kl)
    for run, at in enumerate(found.warning):
        assert scores[run, : at + 1].max() < limit[run]


def test_the_code_of_the_page_runs(tmp_path, monkeypatch, capsys):
    first, *rest = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "monitor.md").read_text(), re.S)
    monkeypatch.chdir(tmp_path)
    exec(compile(first, "monitor.md", "exec"), {})
    said = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert said == ["warning", "stop"]
    assert "watched_run" in os.listdir(tmp_path)
    pytest.importorskip("torch")
    for code in rest:
        ran: dict[str, Any] = {}
        exec(compile(code, "monitor.md", "exec"), ran)
        assert not ran["monitor"].lost
