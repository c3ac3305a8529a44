"""Who wrote each token, and the slices of the model's tokens that follow from it."""

from __future__ import annotations

import enum

import torch

NAMES = ("text", "pre_tool", "post_tool")


class Role(enum.IntEnum):
    """Where a token of an episode comes from."""

    PAD = 0
    PROMPT = 1
    MODEL = 2
    TOOL = 3


def slice_masks(roles: torch.Tensor) -> dict[str, torch.Tensor]:
    """Boolean masks of the three slices; together they hold every token of the model once and no other.

    ``post_tool`` is the model's tokens after the first tool result of their trajectory, ``pre_tool`` those before
    it, ``text`` those of trajectories without a tool result.

    Args:
        roles: (B, T), :class:`Role` of each token of each trajectory.
    """
    model, tool = roles == Role.MODEL, roles == Role.TOOL
    after = tool.cumsum(-1) > 0
    with_tool = after[:, -1:]
    return {"text": model & ~with_tool, "pre_tool": model & with_tool & ~after, "post_tool": model & after}
