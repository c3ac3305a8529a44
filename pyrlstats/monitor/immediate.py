"""Trouble that needs no baseline: values that are not finite, weights that collapse, slices that vanish.

Decided from the history alone. One bad step is told; the run is stopped only for what persists, or is beyond repair.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from pyrlstats.monitor.alerts import Alert, History
from pyrlstats.monitor.episodes import Finding

PERSISTS = 3  # observed steps in a row
VANISHED = 10  # observed steps in a row without a token
COLLAPSED, RUINED = 0.1, 0.02  # of the effective sample size, as a share of the tokens
FEW = 100  # tokens below which a share of them says little


def immediate(
    step: int, signals: Mapping[str, float], scalars: Mapping[str, float], names: tuple[str, ...], history: History
) -> Iterator[Finding]:
    """What is wrong at this step whatever the baseline.

    Args:
        signals: of the slices and the scalars.
        scalars: the trainer's own numbers.
        names: the slices; none where only scalars were observed.
    """
    for name in names:
        yield from _non_finite(step, signals, name, history)
        yield from _collapsed(step, signals, name, history)
        yield from _blind(step, signals, name, history)
        yield from _vanished(step, name, history)
    for name, value in scalars.items():
        if not math.isfinite(value):
            yield from _bad_scalar(step, name, value, history)


def _non_finite(step: int, signals: Mapping[str, float], name: str, history: History) -> Iterator[Finding]:
    tokens, finite = signals[f"{name}/n_tokens"], signals[f"{name}/n_finite"]
    if tokens == finite:
        return
    counts = {key: int(signals[f"{name}/{key}"]) for key in ("n_nan", "n_pos_inf", "n_neg_inf")}
    kept = history.last(f"{name}/n_finite", PERSISTS) / np.maximum(history.last(f"{name}/n_tokens", PERSISTS), 1.0)
    ruined = finite < 0.5 * tokens or (len(kept) == PERSISTS and bool((kept < 0.99).all()))
    share = (tokens - finite) / tokens
    what = ", ".join(f"{count} {key[2:].replace('_', ' ')}" for key, count in counts.items() if count)
    yield Finding(
        f"non-finite:{name}",
        Alert(
            step,
            "non-finite",
            "stop" if ruined else "warning",
            f"{name}/n_finite",
            f"{name}: {share:.2g} of the log-ratios are not finite ({what} of {int(tokens)} tokens)",
            "numerics",
            name,
            {**counts, "n_tokens": int(tokens), "share": share},
        ),
    )


def _collapsed(step: int, signals: Mapping[str, float], name: str, history: History) -> Iterator[Finding]:
    shares, tokens = history.last(f"{name}/ess_fraction", PERSISTS), history.last(f"{name}/n_finite", PERSISTS)
    if len(shares) < PERSISTS or not ((shares < COLLAPSED) & (tokens >= FEW)).all():
        return
    before = history.baseline(f"{name}/ess_fraction")
    if before is not None and shares.max() > 0.5 * before:
        return  # it was never otherwise
    share = float(shares[-1])
    yield Finding(
        f"collapse:{name}",
        Alert(
            step,
            "collapse",
            "stop" if (shares < RUINED).all() else "warning",
            f"{name}/ess_fraction",
            f"{name}: the effective sample size is {share:.2g} of the tokens, {PERSISTS} steps in a row",
            "policy update",
            name,
            {"ess_fraction": share, "baseline": before, "n_finite": int(tokens[-1])},
        ),
    )


def _blind(step: int, signals: Mapping[str, float], name: str, history: History) -> Iterator[Finding]:
    shares, tokens = history.last(f"{name}/zero_fraction", PERSISTS), history.last(f"{name}/n_finite", PERSISTS)
    before = history.baseline(f"{name}/zero_fraction")
    if before is None or before > 0.5 or len(shares) < PERSISTS or not ((shares > 0.999) & (tokens >= FEW)).all():
        return
    yield Finding(
        f"blind:{name}",
        Alert(
            step,
            "blind",
            "warning",
            f"{name}/zero_fraction",
            f"{name}: old and new log-probabilities are equal for {PERSISTS} steps; are the old ones still recorded?",
            "numerics",
            name,
            {"zero_fraction": float(shares[-1]), "baseline": before},
        ),
    )


def _vanished(step: int, name: str, history: History) -> Iterator[Finding]:
    before = history.baseline(f"{name}/n_tokens")
    if not before:
        return
    tokens = history.last(f"{name}/n_tokens", VANISHED)
    if len(tokens) < VANISHED or tokens.any():
        return
    yield Finding(
        f"vanished:{name}",
        Alert(
            step,
            "vanished",
            "warning",
            f"{name}/n_tokens",
            f"{name}: no token for {VANISHED} steps, {before:.0f} a step at the start",
            "environment",
            name,
            {"baseline": before},
        ),
    )


def _bad_scalar(step: int, name: str, value: float, history: History) -> Iterator[Finding]:
    last = history.last(name, 2 * PERSISTS)
    persists = len(last) >= PERSISTS and not np.isfinite(last[-PERSISTS:]).any()
    is_loss = "loss" in name
    ruined = persists and is_loss and bool(np.isfinite(last[:-PERSISTS]).any())
    never_was = persists and is_loss and len(last) == PERSISTS
    # a number that is there at some steps only, such as an evaluation, is no trouble where it is missing
    steady = len(last) > PERSISTS and bool(np.isfinite(last[-PERSISTS - 1 : -1]).all())
    alert = Alert(
        step,
        "non-finite-scalar",
        "stop" if ruined else "warning",
        name,
        f"{name} is {value}" + (f" for {PERSISTS} steps" if persists else ""),
        "numerics",
        None,
        {"value": value},
    )
    yield Finding(f"non-finite-scalar:{name}", alert if ruined or steady or never_was else None)
