"""What the logs should hold: statistics of what a spy inside the trainer recorded, in float64 and with loops."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from pyrlstats.integrations.trl import RATIOS

TURNS = ["turn_0", "turn_1", "turn_2", "turn_3_4", "turn_5_up"]
AGES = ["stale_0", "stale_1", "stale_2", "stale_3", "stale_4_7", "stale_8_up"]
SLICES = ["all", "text", "pre_tool", "post_tool", *TURNS, *AGES]
SAMPLED = {"learner_vs_sampler", "learner_vs_old", "old_vs_sampler"}


def bucket(stem: str, value: int, starts: tuple[int, ...]) -> str:
    first = max(start for start in starts if start <= value)
    after = [start for start in starts if start > first]
    if not after:
        return f"{stem}_{first}_up"
    return f"{stem}_{first}" if after[0] == first + 1 else f"{stem}_{first}_{after[0] - 1}"


def names_of_row(response: list[int], model: list[int], age: int) -> list[list[str]]:
    """The slices of each token of a padded row; none of a token that is not the model's."""
    names: list[list[str]] = [[] for _ in response]
    is_tool = [bool(r and not m) for r, m in zip(response, model, strict=True)]
    turn, apart = -1, True
    for place in range(len(response)):
        apart |= is_tool[place]
        if response[place] and model[place]:
            turn, apart = turn + apart, False
            kind = "text" if not any(is_tool) else "post_tool" if any(is_tool[:place]) else "pre_tool"
            names[place] = [
                "all",
                kind,
                bucket("turn", turn, (0, 1, 2, 3, 5)),
                bucket("stale", age, (0, 1, 2, 3, 4, 8)),
            ]
    return names


Rows = list[np.ndarray]  # float64 (n, 2): log-ratio and advantage of the tokens of one completion; none is empty


def expected(batches: list[dict[str, Any]], ratio: str) -> dict[str, Rows]:
    """Slice -> its completions."""
    new, old = RATIOS[ratio]
    found: dict[str, Rows] = defaultdict(list)
    for batch in batches:
        logps = {
            "learner": batch["learner"],
            "old": batch.get("old_per_token_logps"),
            "sampler": batch.get("sampling_per_token_logps"),
        }
        x = logps[new].double() - logps[old].double()
        response = batch["completion_mask"].tolist()
        model = batch.get("tool_mask", batch["completion_mask"]).tolist()
        for row in range(len(response)):
            advantage = float(batch["advantages"][row])
            tokens: dict[str, list[tuple[float, float]]] = defaultdict(list)
            for place, names in enumerate(names_of_row(response[row], model[row], batch["age"])):
                for name in names:
                    tokens[name].append((float(x[row, place]), advantage))
            for name, pairs in tokens.items():
                found[name].append(np.array(pairs))
    return {name: found[name] for name in SLICES}


def tokens_of(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Log-ratios and advantages of all tokens."""
    return tuple(np.concatenate([np.empty((0, 2)), *rows]).T)  # type: ignore[return-value]


def check(logs: dict[str, Any], prefix: str, rows: Rows, clip: float = 0.2) -> None:
    """Compare the logged statistics of one slice with those of its tokens."""
    got = {key.removeprefix(prefix): value for key, value in logs.items() if key.startswith(prefix)}
    x, advantages = tokens_of(rows)
    assert got.pop("n_tokens") == x.size, prefix
    if x.size == 0:
        assert not got, "an empty slice has nothing to say"
        return
    finite, advantages = x[np.isfinite(x)], advantages[np.isfinite(x)]
    low, high = math.log1p(-clip), math.log1p(clip)
    wanted = {
        "n_finite": finite.size,
        "zero_fraction": np.mean(finite == 0),
        "log_ratio_mean": finite.mean(),
        "log_ratio_min": finite.min(),
        "log_ratio_max": finite.max(),
        "kl_k3": np.mean(np.expm1(finite) - finite),
        "ess_fraction": ess_fraction(np.exp(finite)),
        "clip_fraction": np.mean((finite < low) | (finite > high)),
        "abs_log_ratio_p50": quantile(np.abs(finite), 0.5),
        "abs_log_ratio_p99": quantile(np.abs(finite), 0.99),
        "abs_log_ratio_p99_9": quantile(np.abs(finite), 0.999),
    }
    if "n_sequences" in got:
        sums, means = (np.array([f(one[:, 0]) for one in rows]) for f in (np.sum, np.mean))
        wanted |= {
            "n_sequences": len(rows),
            "sequence_log_ratio_min": sums.min(),
            "sequence_log_ratio_max": sums.max(),
            "sequence_ess_fraction": ess_fraction(np.exp(sums)),
            "sequence_geometric_ess_fraction": ess_fraction(np.exp(means)),
            "sequence_geometric_clip_fraction": np.mean((means < low) | (means > high)),
        }
    if "dual_clip_fraction" in got:
        updates = np.abs(np.exp(finite) * advantages)
        wanted |= {
            "policy_clip_fraction_low": np.mean((finite < low) & (advantages < 0)),
            "policy_clip_fraction_high": np.mean((finite > high) & (advantages > 0)),
            "dual_clip_fraction": np.mean((np.exp(finite) > 3) & (advantages < 0)),
            "update_abs_p99_9": quantile(updates, 0.999),
            **({"update_ess_fraction": ess_fraction(updates)} if updates.any() else {}),
        }
    if "masked_ess_fraction" in got:
        w = np.exp(finite)
        inside = (w >= 0.7) & (w <= 1.5)
        wanted |= {
            "truncated_fraction_low": np.mean(w < 0.7),
            "truncated_fraction_high": np.mean(w > 1.5),
            "clamped_ess_fraction": ess_fraction(np.clip(w, 0.7, 1.5)),
            "masked_ess_fraction": ess_fraction(w * inside),
        }
    assert set(got) == set(wanted), prefix
    for name, value in wanted.items():
        binned = "_p" in name and name.startswith(("abs_", "update_"))
        close = pytest.approx(value, rel=2**-5 if binned else 2e-6, abs=2e-6)
        assert got[name] == close, f"{prefix}{name}"


def ess_fraction(w: np.ndarray) -> float:
    return float(w.sum() ** 2 / (w**2).sum() / w.size) if w.any() else 0.0


def quantile(values: np.ndarray, q: float) -> float:
    """The inverted CDF."""
    return float(np.sort(values)[max(1, math.ceil(q * values.size)) - 1])


def check_log(logs: dict[str, Any], batches: list[dict[str, Any]], ratios: set[str], before: str = "") -> None:
    """Everything in one log of the trainer: these ratios and no others, every slice."""
    prefix = f"{before}rl/"
    assert batches
    assert {key.split("/")[1] for key in logs if key.startswith(prefix)} == ratios
    for ratio in ratios:
        for name, rows in expected(batches, ratio).items():
            check(logs, f"{prefix}{ratio}/{name}/", rows)
