"""A hook for verl's trainers: one call, on the driver, where the two log-probabilities first lie side by side."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from pyrlstats._guard import Guard
from pyrlstats.integrations.verl.slices import rollout_corr_stats
from pyrlstats.slice_stats import SliceStats

_HOME = "verl.utils.debug.metrics"
_NAME = "calculate_debug_metrics"


def attach(
    prefix: str = "rollout_corr_dist/", on_stats: Callable[[SliceStats], None] | None = None
) -> Callable[[], None]:
    """Add :func:`rollout_corr_stats` to what verl's trainers log at every step.

    verl's drivers call ``calculate_debug_metrics(batch)`` right after the old log-probabilities are there, before
    rejection sampling changes ``response_mask``, and log what it returns: it is wrapped. That needs
    ``actor_rollout_ref.rollout.calculate_log_probs=True`` and, as the mismatch itself, no bypass mode.

    The driver is a Ray actor of its own: call this from a module named in ``VERL_USE_EXTERNAL_MODULES``, which verl
    imports in every process. Nothing of ours raises into training: failures are counted and logged once.

    Args:
        prefix: put before every key.
        on_stats: called with the statistics of each step, for sinks.

    Returns:
        A function that detaches.
    """
    guard = Guard("pyrlstats in verl")
    original = getattr(importlib.import_module(_HOME), _NAME)

    def counted(data: Any) -> dict[str, float]:
        batch = data.batch
        stats = rollout_corr_stats(
            batch["old_log_probs"],
            batch["rollout_log_probs"],
            batch["response_mask"],
            batch["attention_mask"] if "attention_mask" in batch.keys() else None,  # noqa: SIM118 a TensorDict
        )
        if on_stats is not None:
            guard(on_stats, stats)
        return stats.to_dict(prefix)

    @wraps(original)
    def watched(data: Any) -> dict[str, Any]:
        metrics: dict[str, Any] = original(data)
        return {**metrics, **(guard(counted, data) or {})}

    _replace(original, watched)
    return lambda: _replace(watched, original)


def _replace(old: Any, new: Any) -> None:
    """In its own module, and in those that have imported it by name."""
    for name, module in list(sys.modules.items()):
        if name.startswith("verl.") and getattr(module, _NAME, None) is old:
            setattr(module, _NAME, new)
