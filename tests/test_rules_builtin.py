"""Each built-in rule fires on a series made for it, once, and all are silent on healthy runs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from source_tree import imported

from pyrlstats.monitor.alerts import Alert
from pyrlstats.monitor.rules import RuleSet, builtin_rules
from pyrlstats.monitor.rules_replay import Table, replay

Floats = NDArray[np.float64]
Change = Callable[[dict[str, Floats]], None]

N, ONSET, WARMUP = 600, 300, 60
RULES = builtin_rules()
SLICES = ("text", "pre_tool", "post_tool")
RAMP = np.maximum(np.arange(N) - ONSET, 0) / 100.0  # 0 up to the onset, 1 a hundred steps later
LATE = np.arange(N) >= ONSET


def noise(rng: np.random.Generator, level: float, size: int = N) -> Floats:
    """AR(1) noise of a relative level, rho 0.5, around 1."""
    steps = rng.standard_normal(size) * level * np.sqrt(1 - 0.5**2)
    values = np.empty(size)
    last = rng.standard_normal() * level
    for i, step in enumerate(steps):
        last = 0.5 * last + step
        values[i] = last
    return 1.0 + values


SCALARS = {**imported("benchmarks.detection.together").SCALARS, "kl_target": 0.03}
STATISTICS = {
    "n_tokens": 50_000.0,
    "zero_fraction": 0.2,
    "kl_k3": 0.004,
    "ess_fraction": 0.9,
    "clip_fraction": 0.05,
    "abs_log_ratio_p99_9": 0.4,
    "tail_ratio": 1.0,
    "pareto_k": 0.3,
    "ks_to_baseline": 0.02,
}


def healthy(seed: int, size: int = N) -> dict[str, Floats]:
    """Signals of a run in which nothing happens; the evaluation comes every 10 steps."""
    rng = np.random.default_rng(seed)
    signals = {name: value * noise(rng, 0.1, size) for name, value in SCALARS.items()}
    signals["kl_target"] = np.full(size, 0.03)
    signals["evaluation"] = np.full(size, np.nan)
    signals["evaluation"][::10] = 0.6 * noise(rng, 0.03, len(signals["evaluation"][::10]))
    for name in SLICES:
        for key, value in STATISTICS.items():
            column = value * noise(rng, 0.1, size)
            signals[f"{name}/{key}"] = np.round(column) if key == "n_tokens" else np.minimum(column, value * 1.09)
        signals[f"{name}/n_finite"] = signals[f"{name}/n_tokens"].copy()
    return signals


def scale(key: str, factor: Floats | float) -> Change:
    def change(signals: dict[str, Floats]) -> None:
        signals[key] = np.where(LATE, signals[key] * factor, signals[key])

    return change


def put(key: str, values: Floats | float) -> Change:
    def change(signals: dict[str, Floats]) -> None:
        signals[key] = np.where(LATE, values, signals[key])

    return change


def add(key: str, values: Floats | float) -> Change:
    def change(signals: dict[str, Floats]) -> None:
        signals[key] = signals[key] + np.where(LATE, values, 0.0)

    return change


def everywhere(key: str, values: Floats | float) -> Change:
    def change(signals: dict[str, Floats]) -> None:
        signals[key] = signals[key] * 0.0 + values

    return change


def all_of(*changes: Change) -> Change:
    def change(signals: dict[str, Floats]) -> None:
        for each in changes:
            each(signals)

    return change


STEP = np.arange(N)
BURSTS = np.where((STEP % 10 == 0) & LATE, 8.0, 1.0)
MADE: dict[str, Change] = {
    "log-ratios-not-finite": scale("post_tool/n_finite", np.where(STEP == 400, 0.9999, 1.0)),
    "many-log-ratios-not-finite": scale("post_tool/n_finite", 0.99),
    "tail-growing": scale("post_tool/abs_log_ratio_p99_9", np.exp(RAMP)),
    "tail-far-from-baseline": scale("post_tool/abs_log_ratio_p99_9", 4.0),
    "one-slice-leaves-the-text": scale("post_tool/abs_log_ratio_p99_9", 2.5),
    "tail-mass-beyond-baseline": put("post_tool/tail_ratio", 20.0),
    "pareto-k-high": put("post_tool/pareto_k", 0.9),
    "distribution-moved": put("post_tool/ks_to_baseline", 0.5),
    "ess-low": put("post_tool/ess_fraction", 0.4),
    "ess-collapse": put("post_tool/ess_fraction", 0.01),
    "ess-falling": scale("post_tool/ess_fraction", np.exp(-RAMP)),
    "kl-k3-high": put("post_tool/kl_k3", 0.2),
    "clipped-tokens": put("post_tool/clip_fraction", 0.5),
    "log-ratio-of-itself": put("post_tool/zero_fraction", 1.0),
    "slice-without-tokens": all_of(put("post_tool/n_tokens", 0.0), put("post_tool/n_finite", 0.0)),
    "loss-not-finite": put("loss", np.where(STEP < 310, np.inf, 0.02)),
    "grad-norm-not-finite": put("grad_norm", np.where(STEP < 310, np.inf, 0.4)),
    "grad-norm-spike": scale("grad_norm", np.where(STEP < 320, 20.0, 1.0)),
    "grad-norm-tail": scale("grad_norm", BURSTS),
    "grad-norm-vanished": scale("grad_norm", 1e-4),
    "kl-above-target": put("kl", 0.08),
    "kl-runaway": scale("kl", np.exp(3 * RAMP)),
    "update-kl-high": put("approx_kl", 0.2),
    "engines-disagree": scale("engine_kl", 8.0),
    "clip-fraction-high": put("clip_ratio", 0.5),
    "entropy-floor": put("entropy", 0.001),
    "entropy-collapse": scale("entropy", np.exp(-RAMP)),
    "entropy-explosion": scale("entropy", np.exp(RAMP)),
    "explained-variance-negative": put("explained_variance", -0.2),
    "value-loss-not-falling": everywhere("explained_variance", 0.05),
    "value-loss-rising": scale("value_loss", 5.0),
    "groups-without-variance": put("zero_std_groups", 0.95),
    "reward-without-spread": scale("reward_std", 0.001),
    "reward-up-evaluation-down": all_of(scale("reward", 1.0 + RAMP), scale("evaluation", np.exp(-RAMP))),
    "evaluation-falling": scale("evaluation", np.exp(-RAMP)),
    "length-inflation": scale("length", 1.0 + RAMP),
    "length-collapse": scale("length", 0.1),
    "responses-truncated": put("truncated", 0.5),
    "advantage-scale": scale("advantage_std", 10.0),
    "advantage-outliers": put("advantage_max", 50.0),
    "staleness-high": put("staleness", 20.0),
    "staleness-growing": scale("staleness", 1.0 + 2 * RAMP),
    "tools-failing": put("tool_failures", 0.9),
    "tools-abandoned": scale("tool_calls", 0.01),
    "steps-slower": scale("step_time", 3.0),
    "memory-growing": scale("memory", 1.0 + RAMP),
}
ABOUT_SLICES = {rule.name for rule in RULES.rules if rule.slices is not None}


def alerts_of(signals: dict[str, Floats], rules: RuleSet = RULES) -> list[Alert]:
    table = Table(np.arange(1, len(signals["loss"]) + 1), signals)
    return replay(rules, table, WARMUP).alerts


def test_every_rule_has_a_series() -> None:
    assert {rule.name for rule in RULES.rules} == set(MADE)


@pytest.mark.parametrize("name", MADE)
def test_a_rule_fires_on_the_series_made_for_it(name: str) -> None:
    signals = healthy(1)
    MADE[name](signals)
    found = [alert for alert in alerts_of(signals) if alert.name == name]
    assert len(found) == 1  # once an episode
    (alert,) = found
    assert alert.step >= (200 if name == "value-loss-not-falling" else ONSET)
    assert alert.slice == ("post_tool" if name in ABOUT_SLICES else None)
    rule = next(rule for rule in RULES.rules if rule.name == name)
    assert (alert.level, alert.link) == (rule.level, rule.link)
    assert rule.title in alert.message
    assert rule.meaning
    assert rule.look_at
    assert rule.try_next
    for condition, evidence in zip(rule.when, alert.evidence["conditions"], strict=True):
        if condition.above is not None:
            assert evidence["measured"] > condition.above
        else:
            assert evidence["measured"] < condition.below


@pytest.mark.parametrize("seed", range(10))
def test_all_are_silent_on_a_healthy_run(seed: int) -> None:
    assert alerts_of(healthy(seed, 2000)) == []
