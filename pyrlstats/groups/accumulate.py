"""Fills the groups of a state from a batch, on any device, without a sync."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import numpy as np

from pyrlstats.backends.batch import Batch
from pyrlstats.backends.tokens import blocks, zeros_like
from pyrlstats.groups import entropy, policy_clip, probabilities, sequences, truncation
from pyrlstats.groups.options import SEQUENCE_QUANTITIES
from pyrlstats.groups.tokens import tokens_of
from pyrlstats.state import Array, State, namespace

_FAMILIES: dict[str, ModuleType] = {
    "entropy": entropy,
    "probabilities": probabilities,
    "truncation": truncation,
    "policy_clip": policy_clip,
}

Engine = Callable[[Batch, State], None]  # adds a batch to a core state
Fill = Callable[[Batch, State], tuple[Array, Array]]  # as backends.cpp.fill_groups
Sums = Callable[[Batch, int], Array]  # as sequences.sums


def accumulate(
    batch: Batch, state: State, engine: Engine, fill: Fill | None = None, sequence_sums: Sums = sequences.sums
) -> None:
    """Add the batch to a state with groups, in place.

    ``engine`` makes the core, and bins the values of the groups with a histogram; ``fill`` the other groups and the
    sums of sequences. Where the backend has none, array operations fill, and ``sequence_sums`` makes those sums. What
    does not fit into memory leaves the state as it was.
    """
    fresh = State.empty(state.names, state.layout, state.clip, _device(state), state.groups)
    engine(batch, fresh.core())
    asked = {group.name for group in state.groups}
    with np.errstate(all="ignore"):
        if fill is None:
            _fill(batch, fresh, engine)
            sums = sequence_sums(batch, len(state.names)) if "sequences" in asked else None
        else:
            updates, sums = fill(batch, fresh)
            if updates is not None:
                engine(replace(batch, logp=updates, old_logp=zeros_like(updates)), fresh.group("updates"))
        if "advantages" in asked:
            engine(
                replace(batch, logp=batch.advantages, old_logp=zeros_like(batch.advantages)), fresh.group("advantages")
            )
        if sums is not None:
            quantities, ids, n_empty = sequences.quantities(sums)
            fresh.group("sequences").count("n_empty")[...] = n_empty
            for name, values in zip(SEQUENCE_QUANTITIES, quantities, strict=True):
                engine(Batch(values, zeros_like(values), None, ids, None), fresh.group(name))
    state.merge_(fresh)


def _fill(batch: Batch, fresh: State, engine: Engine) -> None:
    """The groups of an empty state that are made token by token."""
    asked = {group.name for group in fresh.groups}
    families = {name: family for name, family in _FAMILIES.items() if name in asked}
    for block in blocks(batch, len(fresh.names)) if families else ():
        tokens = tokens_of(block)
        rows = State.empty(fresh.names, fresh.layout, fresh.clip, _device(fresh), fresh.groups)
        for name, family in families.items():
            family.fill(rows.group(name), tokens)
            fresh.group(name).merge_(rows.group(name))
        if "updates" in asked:
            u = policy_clip.updates(tokens)
            engine(Batch(u, zeros_like(u), tuple(block.members), None, None), fresh.group("updates"))


def _device(state: State) -> object:
    return None if namespace(state.buffer) is np else state.buffer.device
