"""What the families are given: one block of tokens in float64."""

from __future__ import annotations

from typing import NamedTuple

from pyrlstats.backends.tokens import Block, as_dtype
from pyrlstats.state import Array, State, namespace


class Tokens(NamedTuple):
    """A block of n tokens, S slices.

    Attributes:
        members: bool (S, n), those with finite x.
        x: float64 (n,), 0 where it is not finite.
        every_x: float64 (n,), NaN and infinities kept.
        logp, old_logp, advantages: float64 (n,), as given; advantages None where there are none.
    """

    members: Array
    x: Array
    every_x: Array
    logp: Array
    old_logp: Array
    advantages: Array

    def count_in(self, section: State, name: str, flag: Array) -> None:
        """Fill a row of counts with the members for which ``flag`` (n,) holds."""
        section.count(name)[...] = (self.members & flag).sum(-1)

    def sum_in(self, section: State, name: str, values: Array) -> None:
        """Fill a row of sums with that of ``values``, (n,) or (S, n), over the members."""
        section.sum(name)[...] = namespace(values).where(self.members, values, 0.0).sum(-1)

    def maximum_in(self, section: State, name: str, values: Array) -> None:
        """Fill a row of maxima with that of ``values``, (n,), over the members."""
        xp = namespace(values)
        section.maximum(name)[...] = xp.amax(xp.where(self.members, values, -float("inf")), -1)


def tokens_of(block: Block) -> Tokens:
    every_x = block.log_ratio()
    xp = namespace(every_x)
    finite = xp.isfinite(every_x)
    every_x, logp, old_logp = (as_dtype(array, xp.float64) for array in (every_x, block.logp, block.old_logp))
    advantages = None if block.advantages is None else as_dtype(block.advantages, xp.float64)
    return Tokens(block.members & finite, xp.where(finite, every_x, 0.0), every_x, logp, old_logp, advantages)
