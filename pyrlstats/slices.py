"""Slices that an agent run really has: before and after tool results, turns, positions, staleness, groups.

Every builder returns :class:`Slices`: one small integer a token and the names it stands for, on the input's device
(NumPy in, NumPy out). That is the cheapest form for the engines, one byte a token whatever the number of slices::

    where = tool_slices(model_mask)
    stats = pyrlstats.slice_stats(logp, old_logp, slice_ids=where.ids, names=where.names)

Two families combine with ``&`` into all their pairs, still one integer a token; :func:`pool` adds slices up again
afterwards, exactly, from their states. A family is also a mapping name -> boolean mask, for ``masks=`` and for
``&``, ``|`` and ``~`` of single masks.

Nothing here syncs or allocates by data; there is no loop over sequences.

Layouts. By default the last axis of the mask is one sequence: rows of ``[B, T]``, padded on either side. In a packed
batch sequences follow one another, and either ``position_ids`` (any shape of the mask, 0 at the first token of each
sequence) or ``cu_seqlens`` (their boundaries ``[0, n_1, n_1 + n_2, ...]``, for masks ``[N]`` or ``[1, N]``) says where.
Tokens beyond the last boundary are a sequence of their own.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from pyrlstats._inputs import device_of
from pyrlstats._sequences import (
    as_arrays,
    as_int8,
    as_integers,
    broadcast_to,
    is_strings,
    members,
    smallest,
    spread,
    to_device,
    trajectory,
)
from pyrlstats.layout import check_names
from pyrlstats.slice_stats import SliceStats
from pyrlstats.state import Array, State, namespace
from pyrlstats.values import ValueStats

TURN_BUCKETS = (0, 1, 2, 3, 5)
STALENESS_BUCKETS = (0, 1, 2, 3, 4, 8)


class Slices(Mapping[str, Array]):
    """Disjoint slices of tokens: a small integer each, and a mapping name -> boolean mask.

    Attributes:
        ids: int8, or int16 and int32 for many names; the index into ``names``, -1 for a token in no slice. Of the
            tokens' shape, or of one that broadcasts to it, such as ``[B, 1]``.
        names: slice names, in order.

    ``slices["post_tool"]`` is a boolean mask, made when asked for. ``a & b`` of two families is the family of all
    pairs, named ``post_tool__turn_1``; ``a & mask`` keeps the tokens where a mask is not 0; ``a | b`` is a plain
    dictionary of the masks of both, which may overlap; ``~a`` is the mask of the tokens in no slice.
    """

    __slots__ = ("ids", "names")
    __array_ufunc__ = None  # NumPy leaves mask & slices to __rand__

    def __init__(self, ids: Array, names: Sequence[str]) -> None:
        self.ids = ids
        self.names = check_names(names)

    def __getitem__(self, name: str) -> Array:
        try:
            return self.ids == self.names.index(name)
        except ValueError:
            raise KeyError(f"no slice {name!r}; there are {list(self.names)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    def __and__(self, other: Any) -> Slices:
        """Every pair of two families, or this family where a mask (broadcast) is not 0."""
        if not isinstance(other, Slices):
            mask = as_arrays(slices=self.ids, mask=other)["mask"]
            return Slices((self.ids + 1) * (mask != 0) - 1, self.names)
        names = [f"{mine}__{theirs}" for mine, theirs in itertools.product(self.names, other.names)]
        arrays = as_arrays(slices=self.ids, other=other.ids)
        mine, theirs = smallest(arrays["slices"], len(names)), smallest(arrays["other"], len(names))
        return Slices(members((mine >= 0) & (theirs >= 0), mine * len(other) + theirs), names)

    __rand__ = __and__

    def __or__(self, other: Mapping[str, Array]) -> dict[str, Array]:
        """The masks of both, overlapping, for ``masks=``: one boolean a token and slice.

        Raises:
            ValueError: a name that both have.
        """
        if not isinstance(other, Mapping):
            return NotImplemented
        both = [name for name in self if name in other]
        if both:
            raise ValueError(f"both sides of | have the slices {both}: names must differ")
        return {**self, **other}

    def __ror__(self, other: Mapping[str, Array]) -> dict[str, Array]:
        if not isinstance(other, Mapping):
            return NotImplemented
        joined = self | other
        return {name: joined[name] for name in (*other, *self)}

    def __invert__(self) -> Array:
        return self.ids < 0

    def __repr__(self) -> str:
        return f"Slices({list(self.names)}, ids {self.ids.dtype} {tuple(self.ids.shape)})"


Stats = TypeVar("Stats", SliceStats, ValueStats)


def pool(stats: Stats, groups: Mapping[str, Sequence[str]]) -> Stats:
    """Statistics of unions of slices, from the states alone: exact where the slices are disjoint.

    A token that two of the slices share counts twice.

    Args:
        stats: of any slices.
        groups: new name -> the slices that it pools, at least one; groups may share slices.

    Returns:
        Statistics of the new slices, on the same device. Does not sync. ``n_out_of_range`` is kept.

    Raises:
        KeyError: a slice that ``stats`` does not have.
        ValueError: a group without slices, or names that are not slice names.
    """
    state = stats.state
    names = check_names(tuple(groups))
    places = []
    for name, wanted in groups.items():
        unknown = [one for one in wanted if one not in state.names]
        if unknown:
            raise KeyError(f"group {name!r} holds unknown slices {unknown}; there are {list(state.names)}")
        if not wanted:
            raise ValueError(f"group {name!r} must hold at least one slice, got none")
        places.append([state.names.index(one) for one in wanted])
    pooled = State.empty(names, state.layout, state.clip, device_of(state.buffer))
    for round_ in itertools.zip_longest(*places):
        fresh = State.empty(names, state.layout, state.clip, device_of(state.buffer))
        for group, member in enumerate(round_):
            if member is not None:
                for field in ("counts", "histogram", "sums", "maxima"):
                    getattr(fresh, field)[group] = getattr(state, field)[member]
        fresh.count("n_out_of_range")[...] = 0
        pooled.merge_(fresh)
    pooled.count("n_out_of_range")[0] = state.count("n_out_of_range").sum()
    return type(stats)(pooled)


def tool_slices(
    model_mask: Any,
    tool_mask: Any = None,
    *,
    response_mask: Any = None,
    cu_seqlens: Any = None,
    position_ids: Any = None,
) -> Slices:
    """``text``, ``pre_tool`` and ``post_tool``: the model's tokens around the first tool result of their trajectory.

    ``post_tool`` are the model's tokens after the first tool result of their sequence, ``pre_tool`` those before it,
    ``text`` those of sequences without a tool result. Together they hold every token of the model once.

    Tool results are known in one of three ways:

    - ``tool_mask`` marks them (non-zero = token of a tool result). A token in both masks is the tool's.
    - ``response_mask`` marks the whole response, the model's and the tools' tokens: what is not the model's is a tool
      result. This is TRL's pair: ``tool_slices(tool_mask, response_mask=completion_mask)``, where ``tool_mask`` is
      1 for the model and 0 for tools, and padding, 0 or 1, is outside ``completion_mask``.
    - from ``model_mask`` alone, by its holes: a run of other tokens between two runs of the model's in one sequence.
      The prompt and padding on either side are no holes. A tool result that nothing follows cannot be told from
      padding: that sequence counts as without it. A user's turn, or a token taken out of the loss, is a hole too.

    Args:
        model_mask: non-zero for tokens of the model; any shape, sequences along the last axis.
        tool_mask, response_mask: as above; at most one of them. Broadcast to ``model_mask``'s shape.
        cu_seqlens, position_ids: boundaries of a packed batch; see the module.

    Raises:
        ValueError: shapes or devices that do not fit, or arguments that exclude each other.
    """
    run = trajectory(model_mask, tool_mask, response_mask, cu_seqlens, position_ids)
    results = run.turns() if run.tool is None else run.sequences.count_through(run.tool)
    after, with_tool = results > 0, run.sequences.last_of(results) > 0
    return Slices(members(run.model, as_int8(after) + as_int8(with_tool)), ("text", "pre_tool", "post_tool"))


def tool_call_slices(
    model_mask: Any,
    tool_mask: Any = None,
    *,
    call_mask: Any = None,
    response_mask: Any = None,
    cu_seqlens: Any = None,
    position_ids: Any = None,
) -> Slices:
    """``tool_call`` and ``no_tool_call``: the model's tokens that call a tool, and its others.

    Args:
        call_mask: non-zero for the tokens of a call. Without it, ``tool_call`` are all tokens of a turn that a tool
            result follows.
        model_mask, tool_mask, response_mask, cu_seqlens, position_ids: as for :func:`tool_slices`.

    Raises:
        ValueError: as :func:`tool_slices`.
    """
    run = trajectory(model_mask, tool_mask, response_mask, cu_seqlens, position_ids)
    if call_mask is not None:
        arrays = as_arrays(model_mask=run.model, call_mask=call_mask)
        calls = broadcast_to(arrays, "call_mask", "model_mask") != 0
    else:
        results = run.turns() if run.tool is None else run.sequences.count_through(run.tool)
        calls = run.sequences.last_of(results) > results
    return Slices(members(run.model, as_int8(~calls)), ("tool_call", "no_tool_call"))


def turn_slices(
    model_mask: Any,
    tool_mask: Any = None,
    *,
    response_mask: Any = None,
    buckets: Sequence[int] = TURN_BUCKETS,
    cu_seqlens: Any = None,
    position_ids: Any = None,
) -> Slices:
    """``turn_0``, ``turn_1``, ``turn_2``, ``turn_3_4``, ``turn_5_up``: the model's tokens by the turn they belong to.

    The model's first turn in its sequence is turn 0; a new one begins at a token of the model with a tool result
    (or, without ``tool_mask`` and ``response_mask``, any other token) between it and the model's token before.

    Args:
        buckets: the first turn of each slice, ascending; earlier turns are in no slice.
        model_mask, tool_mask, response_mask, cu_seqlens, position_ids: as for :func:`tool_slices`.

    Raises:
        TypeError: buckets that are no integers.
        ValueError: as :func:`tool_slices`, or buckets that do not ascend.
    """
    run = trajectory(model_mask, tool_mask, response_mask, cu_seqlens, position_ids)
    return _bucketed("turn", run.turns(), run.model, buckets)


def position_slices(
    model_mask: Any,
    *,
    first: int = 256,
    last: int = 256,
    buckets: Sequence[int] | None = None,
    cu_seqlens: Any = None,
    position_ids: Any = None,
) -> Slices:
    """Tokens by their position among the tokens of ``model_mask`` in their sequence, counted from 0.

    Args:
        model_mask: non-zero for the tokens that count; any shape, sequences along the last axis.
        first, last: ``first_256``, ``middle`` and ``last_256``; a token that is both first and last is ``first``.
        buckets: instead of them, the first position of each slice, ascending: (0, 1, 16) gives ``position_0``,
            ``position_1_15``, ``position_16_up``.
        cu_seqlens, position_ids: boundaries of a packed batch; see the module.

    Raises:
        ValueError: first or last below 1, buckets that do not ascend, or shapes and devices that do not fit.
    """
    run = trajectory(model_mask, None, None, cu_seqlens, position_ids)
    through = run.sequences.count_through(run.model)
    if buckets is not None:
        return _bucketed("position", through - 1, run.model, buckets)
    for name, value in (("first", first), ("last", last)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1 token, got {value}")
    to_come = run.sequences.last_of(through) - through
    beyond = through > first
    kind = as_int8(beyond) + as_int8(beyond & (to_come < last))
    return Slices(members(run.model, kind), (f"first_{first}", "middle", f"last_{last}"))


def staleness_slices(
    current_version: Any,
    versions: Any,
    *,
    buckets: Sequence[int] = STALENESS_BUCKETS,
    cu_seqlens: Any = None,
    n_tokens: int | None = None,
) -> Slices:
    """``stale_0``, ``stale_1``, ``stale_2``, ``stale_3``, ``stale_4_7``, ``stale_8_up``: by age of the sampling policy.

    The age is ``current_version - version``, in policy versions, and 0 where a version is newer than the current one.
    A negative version marks tokens that no policy wrote (prompt, tool): they are in no slice.

    Args:
        current_version: of the policy being trained: a number, or a 0-d tensor.
        versions: integers. Per token, or per row as ``[B, 1]``; with ``cu_seqlens`` per sequence or segment, ``(K,)``
            for a packed batch and ``(B, K)`` for rows.
        buckets: the first age of each slice, ascending; smaller ages are in no slice.
        cu_seqlens: boundaries ``(..., K + 1)``, in tokens, of the sequences, or of the segments that one policy
            version wrote; tokens outside them are in no slice.
        n_tokens: tokens of the packed batch or of a row; needed with ``cu_seqlens``.

    Raises:
        ValueError: buckets that do not ascend, shapes or devices that do not fit, or only one of cu_seqlens and
            n_tokens.
    """
    version = as_integers("versions", spread("versions", versions, cu_seqlens, n_tokens))
    xp = namespace(version)
    age = current_version - version
    return _bucketed("stale", xp.clip(age, 0, None), version >= 0, buckets)


def advantage_sign_slices(advantages: Any, *, cu_seqlens: Any = None, n_tokens: int | None = None) -> Slices:
    """``adv_positive``, ``adv_zero``, ``adv_negative``: tokens by the sign of their advantage; NaN is in no slice.

    Args:
        advantages: per token, or per row as ``[B, 1]``; with ``cu_seqlens`` one a sequence of a packed batch.
        cu_seqlens, n_tokens: as for :func:`staleness_slices`.

    Raises:
        ValueError: shapes or devices that do not fit, or only one of cu_seqlens and n_tokens.
    """
    advantage = spread("advantages", advantages, cu_seqlens, n_tokens, outside=float("nan"))
    below = as_int8(advantage <= 0) + as_int8(advantage < 0)
    return Slices(members(advantage == advantage, below), ("adv_positive", "adv_zero", "adv_negative"))


def group_slices(
    ids: Any,
    names: Sequence[str] | Mapping[str, int],
    *,
    other: str | None = None,
    cu_seqlens: Any = None,
    n_tokens: int | None = None,
    device: Any = None,
) -> Slices:
    """One slice a group: environment, tool name, data source.

    Args:
        ids: integers per token, or per row as ``[B, 1]``, or with ``cu_seqlens`` one a sequence or segment; negative
            is no group. Or a sequence of strings, one a row (a column ``[B, 1]`` comes out) or, with ``cu_seqlens``,
            one a sequence: the names themselves.
        names: the groups, distinct, not empty, without "/"; an integer id is the index into a sequence, or the value
            in a mapping name -> id.
        other: name of one more slice for the ids that ``names`` lacks; without it they are in no slice.
        cu_seqlens, n_tokens: as for :func:`staleness_slices`.
        device: torch device of the slices made from strings; None gives a NumPy array.

    Raises:
        ValueError: names, shapes or devices that do not fit, or only one of cu_seqlens and n_tokens.
    """
    known = check_names(tuple(names))
    codes = list(names.values()) if isinstance(names, Mapping) else list(range(len(known)))
    if is_strings(ids):
        codes = list(range(len(known)))
        position = dict(zip(known, codes, strict=True))
        host = np.array([position.get(one, len(known)) for one in ids], np.int64)
        ids = to_device(host if cu_seqlens is not None else host[:, None], device)
    if len(set(codes)) != len(codes):
        raise ValueError(f"names must map to different ids, got {dict(names)}")  # type: ignore[arg-type]
    value = as_integers("ids", spread("ids", ids, cu_seqlens, n_tokens))
    number = smallest(as_int8(value != value), len(known) + 1)
    for place, code in enumerate(codes, 1):
        number = number + place * smallest(as_int8(value == code), len(known) + 1)
    if other is not None:
        number = number + (len(known) + 1) * smallest(as_int8((number == 0) & (value >= 0)), len(known) + 1)
    return Slices(number - 1, known if other is None else (*known, other))


def _bucketed(stem: str, value: Array, member: Array, buckets: Sequence[int]) -> Slices:
    try:
        lowest = [operator.index(bound) for bound in buckets]
    except TypeError:
        raise TypeError(f"buckets must be integers, got {list(buckets)}") from None
    if not lowest or any(low >= high for low, high in itertools.pairwise(lowest)):
        raise ValueError(f"buckets must be at least one integer, strictly ascending, got {list(buckets)}")
    names = []
    for low, following in itertools.zip_longest(lowest, lowest[1:]):
        last = "up" if following is None else str(following - 1)
        names.append(f"{stem}_{low}" if last == str(low) else f"{stem}_{low}_{last}")
    reached = smallest(as_int8(value >= lowest[0]), len(names))
    for bound in lowest[1:]:
        reached = reached + as_int8(value >= bound)
    return Slices(reached * member - 1, names)
