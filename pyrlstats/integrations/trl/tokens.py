"""One micro-batch as a trainer's loss sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pyrlstats.slices import Slices
from pyrlstats.state import Array

RATIOS = {
    "learner_vs_sampler": ("learner", "sampler"),
    "learner_vs_old": ("learner", "old"),
    "old_vs_sampler": ("old", "sampler"),
}
"""Name of a ratio -> whose log-probabilities are ``logp`` and ``old_logp``.

``learner`` is the policy whose gradient is taken, ``old`` the trainer's own policy as it was when the batch was
generated, ``sampler`` the engine that generated it, by its own account.
"""


@dataclass(frozen=True)
class Tokens:
    """The tokens of one micro-batch.

    Attributes:
        logps: "learner", "old" and "sampler" -> log-probabilities of the tokens, nats; those that exist, of one shape.
        mask: non-zero for the tokens of the loss, broadcastable to that shape.
        along: ``along(tool_slices)`` applies a builder of :mod:`pyrlstats.slices` that knows trajectories.
        age: of the policy that wrote the tokens: a number, or int64 of their shape, negative where unknown; or None.
        advantages: one a row ``(B,)`` or one a token.
        cu_seqlens: boundaries of the sequences of a packed batch; None where the rows are sequences.
        inputs: what the trainer gave to its loss, for slices of your own. Not to be changed.
    """

    logps: Mapping[str, Array]
    mask: Array
    along: Callable[[Callable[..., Slices]], Slices]
    age: int | Array | None
    advantages: Array
    cu_seqlens: Array | None
    inputs: Mapping[str, Any]
