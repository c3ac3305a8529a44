"""The slices that ``attach`` counts: families by name, and your own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from pyrlstats.integrations.trl.tokens import Tokens
from pyrlstats.slices import staleness_slices, tool_slices, turn_slices
from pyrlstats.state import Array

ALL = "all"  # every token of the loss


class Family(NamedTuple):
    """Slices of one kind.

    Attributes:
        names: of the slices, known before the first micro-batch, the same on every rank.
        masks: from a micro-batch to name -> mask, for example a :class:`pyrlstats.slices.Slices`. It should neither
            sync nor draw random numbers. None where the micro-batch says nothing of it: the slices stay empty then.
    """

    names: tuple[str, ...]
    masks: Callable[[Tokens], Mapping[str, Array] | None]


def _staleness(tokens: Tokens) -> Mapping[str, Array] | None:
    if tokens.age is None:
        return None
    age = tokens.age
    if isinstance(age, int):
        age = torch.full((1, 1), age, device=tokens.mask.device)
    return staleness_slices(age, -(age < 0).to(torch.int64))  # a negative version is no version


FAMILIES = {
    "tool": Family(("text", "pre_tool", "post_tool"), lambda tokens: tokens.along(tool_slices)),
    "turn": Family(("turn_0", "turn_1", "turn_2", "turn_3_4", "turn_5_up"), lambda tokens: tokens.along(turn_slices)),
    "staleness": Family(("stale_0", "stale_1", "stale_2", "stale_3", "stale_4_7", "stale_8_up"), _staleness),
}
"""Families by the name that ``attach(slices=...)`` takes."""


def resolve(slices: Sequence[str | Family] | None, default: Sequence[str], known: Sequence[str]) -> tuple[Family, ...]:
    """The families that ``attach(slices=...)`` means, of a trainer that knows the families ``known``.

    Raises:
        TypeError: something else than names and families.
        ValueError: a name that the trainer does not know.
    """
    if isinstance(slices, (str, Family)):
        raise TypeError(f"slices must be a sequence of names and families, got {slices!r}: use [{slices!r}]")
    found = []
    for one in default if slices is None else slices:
        if isinstance(one, str) and one in known:
            found.append(FAMILIES[one])
        elif isinstance(one, Family):
            found.append(one)
        elif isinstance(one, str):
            raise ValueError(f"slices of this trainer must be among {list(known)} or Family objects, got {one!r}")
        else:
            raise TypeError(f"slices must be names or Family objects, got {type(one).__name__}")
    return tuple(found)


def names_of(families: Sequence[Family]) -> tuple[str, ...]:
    return (ALL, *(name for family in families for name in family.names))


def masks_of(families: Sequence[Family], tokens: Tokens) -> dict[str, Any]:
    """A mask for every name; nobody's where a family says nothing."""
    masks = {ALL: tokens.mask}
    nobody = torch.zeros(1, dtype=torch.bool, device=tokens.mask.device)
    for family in families:
        found = family.masks(tokens)
        masks.update({name: nobody if found is None else found[name] for name in family.names})
    return masks
