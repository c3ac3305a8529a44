"""Before and after tool results, in verl's layout."""

from __future__ import annotations

import torch

from pyrlstats.api import slice_stats
from pyrlstats.slice_stats import SliceStats
from pyrlstats.slices import Slices, pool, tool_slices


def rollout_slices(response_mask: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Slices:
    """``text``, ``pre_tool`` and ``post_tool`` of verl's agent loops.

    There ``response_mask`` is 1 for the model's tokens and 0 for tool results and padding: what a tool wrote is a hole.
    A tool result that ends a response can be told from padding only with ``attention_mask``.

    Args:
        response_mask: (B, T), as the agent loop made it. After rejection sampling it is too late: what is rejected
            would look like a tool result.
        attention_mask: (B, T) of the response, or (B, prompt + T), whose last T columns are taken.

    Raises:
        ValueError: shapes that do not fit.
    """
    if attention_mask is None:
        return tool_slices(response_mask)
    beyond = attention_mask.shape[-1] - response_mask.shape[-1]
    if beyond < 0:
        raise ValueError(
            f"attention_mask must have at least response_mask's {response_mask.shape[-1]} columns, "
            f"got {attention_mask.shape[-1]}"
        )
    return tool_slices(response_mask, response_mask=attention_mask[..., beyond:])


def rollout_corr_stats(
    old_log_prob: torch.Tensor,
    rollout_log_prob: torch.Tensor,
    response_mask: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    clip: tuple[float, float] = (0.2, 0.2),
) -> SliceStats:
    """The distribution of ``x = old_log_prob - rollout_log_prob``: raw, never truncated, by slice.

    Args:
        old_log_prob, rollout_log_prob, response_mask: (B, T), as for :func:`rollout_corr_metrics`.
        attention_mask: as for :func:`rollout_slices`.
        clip: (low, high) of the ratio clip whose shares are counted.

    Returns:
        Slices ``all``, ``text``, ``pre_tool`` and ``post_tool``; the last three are disjoint and make up the first.

    Raises:
        ValueError: shapes that do not fit.
    """
    family = rollout_slices(response_mask, attention_mask)
    stats = slice_stats(old_log_prob, rollout_log_prob, family, clip=clip)
    return pool(stats, {"all": list(family), **{name: [name] for name in family}})
