"""Who wrote each token, and the slices of the model's tokens that follow from it."""

from __future__ import annotations

import enum

import torch

from pyrlstats.slices import Slices, tool_slices

NAMES = ("text", "pre_tool", "post_tool")


class Role(enum.IntEnum):
    """Where a token of an episode comes from."""

    PAD = 0
    PROMPT = 1
    MODEL = 2
    TOOL = 3


def slices_of(roles: torch.Tensor) -> Slices:
    """The three slices; together they hold every token of the model once and no other.

    Args:
        roles: (B, T), :class:`Role` of each token of each trajectory.
    """
    return tool_slices(roles == Role.MODEL, roles == Role.TOOL)
