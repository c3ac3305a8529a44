"""The growth detectors and the built-in rules on the same stationary runs: false alarms of a monitor that has both.

The slices' signals are simulated as in :mod:`benchmarks.detection.family`, with Pareto k among them, and go through the
growth detectors as logarithms and through the rules as figures. The trainer's scalars are simulated beside them, at the
levels of a run that goes well. Rules are replayed, which decides as asking them step by step does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.detection import family
from benchmarks.detection.noise import ar1
from pyrlstats.monitor.rules import RuleSet, builtin_rules
from pyrlstats.monitor.rules_replay import Table, replay
from pyrlstats.monitor.settings import Settings
from pyrlstats.monitor.signals import KEYS

Floats = NDArray[np.float64]

NAMES = ("text", "pre_tool", "post_tool")
TOKENS = 50_000.0
LEVELS = {
    "abs_log_ratio_p99_9": 0.1,
    "abs_log_ratio_p99_99": 0.3,
    "tail_mass": 1e-3,
    "tail_to_mean": 0.01,
    "chi2": 0.02,
    "kl_k3": 1e-3,
    "clip_fraction": 0.01,
    "ks_to_baseline": 0.02,
    "zero_fraction": 0.2,
    "nonzero_fraction": 0.8,
    "pareto_k": 0.3,
}
SCALARS = {
    "kl": 0.03,
    "approx_kl": 0.004,
    "engine_kl": 0.0005,
    "clip_ratio": 0.1,
    "entropy": 0.4,
    "explained_variance": 0.6,
    "value_loss": 0.2,
    "reward": 0.5,
    "reward_std": 0.3,
    "zero_std_groups": 0.3,
    "length": 800.0,
    "truncated": 0.03,
    "advantage_std": 1.0,
    "advantage_max": 3.0,
    "grad_norm": 0.4,
    "loss": 0.02,
    "staleness": 1.5,
    "tool_failures": 0.05,
    "tool_calls": 2.0,
    "step_time": 30.0,
    "memory": 60.0,
}
EVALUATION, EVALUATED, EVALUATION_SD = 0.6, 10, 0.03  # its level, every how many steps, its relative noise


def table_of(values: Floats, scalars: Floats, evaluation: Floats) -> Table:
    """A run as rules see it: of the signals (T, K), the scalars' relative noise (T, len(SCALARS)), the evaluation's."""
    steps = len(values)
    signals: dict[str, Floats] = {}
    for index, name in enumerate(NAMES):
        columns = dict(zip(KEYS, values[:, index * len(KEYS) : (index + 1) * len(KEYS)].T, strict=True))
        for key, level in LEVELS.items():
            signals[f"{name}/{key}"] = level * np.exp(columns[key])
        signals[f"{name}/zero_fraction"] = np.minimum(signals[f"{name}/zero_fraction"], 1.0)
        signals[f"{name}/ess_fraction"] = 1.0 / (1.0 + signals[f"{name}/chi2"])
        signals[f"{name}/tail_ratio"] = signals[f"{name}/tail_mass"] / LEVELS["tail_mass"]
        signals[f"{name}/n_tokens"] = signals[f"{name}/n_finite"] = np.full(steps, TOKENS)
    signals.update({name: level * (1.0 + scalars[:, index]) for index, (name, level) in enumerate(SCALARS.items())})
    signals["kl_target"] = np.full(steps, SCALARS["kl"])
    signals["evaluation"] = np.full(steps, np.nan)
    signals["evaluation"][::EVALUATED] = EVALUATION * (1.0 + evaluation)
    return Table(np.arange(1, steps + 1), signals)


def asked(rules: RuleSet, table: Table) -> dict[str, str]:
    """Names of the rules that said something in a run, with their level; those of level info are quiet."""
    alerts = replay(rules, table, Settings().baseline).alerts
    return {alert.name: alert.level for alert in alerts if alert.level != "info"}


def false_alarms(runs: int, steps: int = 2000, seed: int = 3, batch: int = 50) -> list[dict[str, Any]]:
    """Share of stationary runs with any warning, and with a stop, by the detectors, by the rules, and by either."""
    rules = builtin_rules()
    rows = []
    for name, kind in family.STATIONARY.items():
        rng = np.random.default_rng(seed)
        warned, stopped, fired = [], [], Counter[str]()
        for _ in range(runs // batch):
            values = np.array(list(kind(rng, batch, steps)))
            scalars = np.array(list(ar1(rng, (batch, len(SCALARS)), steps)))
            evaluation = np.array(list(ar1(rng, (batch,), -(-steps // EVALUATED), 0.5, EVALUATION_SD)))
            found = family.watch(iter(values), Settings())
            for run in range(batch):
                said = asked(rules, table_of(values[:, run], scalars[:, run], evaluation[:, run]))
                fired.update(list(said))
                warned.append((found.warning[run] >= 0, bool(said)))
                stopped.append((found.stop[run] >= 0, "stop" in said.values()))
        rows.append(
            {
                "noise": name,
                "runs": len(warned),
                "steps": steps,
                "warnings": _shares(np.array(warned)),
                "stops": _shares(np.array(stopped)),
                "rules": dict(fired.most_common()),
            }
        )
    return rows


def _shares(said: NDArray[np.bool_]) -> Mapping[str, float | list[float]]:
    either = said.any(1)
    return {
        "detectors": float(said[:, 0].mean()),
        "rules": float(said[:, 1].mean()),
        "either": float(either.mean()),
        "interval": wilson(int(either.sum()), len(either)),
    }


def wilson(found: int, n: int, z: float = 1.96) -> list[float]:
    """The 95 % interval of a share (Wilson 1927)."""
    share = found / n
    middle, half = share + z**2 / (2 * n), z * np.sqrt(share * (1.0 - share) / n + z**2 / (4 * n**2))
    return [float((middle - half) / (1.0 + z**2 / n)), float((middle + half) / (1.0 + z**2 / n))]
