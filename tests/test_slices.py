"""Slices against a plain Python loop over the tokens, padded and packed, NumPy and torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import promises
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pyrlstats
from pyrlstats.slices import (
    Slices,
    advantage_sign_slices,
    group_slices,
    pool,
    position_slices,
    staleness_slices,
    tool_call_slices,
    tool_slices,
    turn_slices,
)

OTHER, MODEL, TOOL = 0, 1, 2

sequences = st.lists(st.lists(st.sampled_from([OTHER, MODEL, MODEL, TOOL]), max_size=9), max_size=5)
Labels = Callable[[list[int], bool], list[str | None]]


# the definitions, one token after the other


def turns(roles: list[int], holes: bool) -> list[int | None]:
    """The model's turn of each of its tokens; with ``holes`` whatever is not the model's is a tool result."""
    found: list[int | None] = []
    turn, apart = -1, True
    for role in roles:
        if role == MODEL:
            if apart or turn < 0:
                turn += 1
            apart = False
            found.append(turn)
        else:
            apart = apart or holes or role == TOOL
            found.append(None)
    return found


def tool_results(roles: list[int], holes: bool) -> list[int]:
    if not holes:
        return [i for i, role in enumerate(roles) if role == TOOL]
    model = [i for i, role in enumerate(roles) if role == MODEL]
    return [i for i in range(model[0], model[-1]) if roles[i] != MODEL] if model else []


def tool_labels(roles: list[int], holes: bool) -> list[str | None]:
    results = tool_results(roles, holes)
    labels: list[str | None] = []
    for i, role in enumerate(roles):
        if role != MODEL:
            labels.append(None)
        elif not results:
            labels.append("text")
        else:
            labels.append("post_tool" if i > results[0] else "pre_tool")
    return labels


def call_labels(roles: list[int], holes: bool) -> list[str | None]:
    last = max(tool_results(roles, holes), default=-1)
    return [None if role != MODEL else "tool_call" if i < last else "no_tool_call" for i, role in enumerate(roles)]


def turn_labels(roles: list[int], holes: bool) -> list[str | None]:
    names = {0: "turn_0", 1: "turn_1", 2: "turn_2", 3: "turn_3_4", 4: "turn_3_4"}
    return [None if turn is None else names.get(turn, "turn_5_up") for turn in turns(roles, holes)]


def position_labels(roles: list[int], holes: bool) -> list[str | None]:
    total = roles.count(MODEL)
    labels: list[str | None] = []
    position = 0
    for role in roles:
        if role != MODEL:
            labels.append(None)
            continue
        labels.append("first_2" if position < 2 else "last_3" if position >= total - 3 else "middle")
        position += 1
    return labels


BUILDERS: dict[str, tuple[Callable[..., Slices], Labels]] = {
    "tool": (tool_slices, tool_labels),
    "call": (tool_call_slices, call_labels),
    "turn": (turn_slices, turn_labels),
    "position": (lambda mask, tool=None, **layout: position_slices(mask, first=2, last=3, **layout), position_labels),
}


def as_labels(slices: Slices, shape: tuple[int, ...]) -> list[Any]:
    """The name of each token's slice, or None, in the tokens' shape."""
    assert tuple(slices.ids.shape) == shape
    names = [*slices.names, None]
    return [names[index] for index in np.asarray(slices.ids).reshape(-1).tolist()]


def array(kind: str, values: Any, dtype: Any) -> Any:
    made = np.array(values, dtype)
    return made if kind == "numpy" else torch.from_numpy(made)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("holes", [True, False])
@given(rows=sequences, left=st.integers(0, 2))
def test_padded_rows(kind: str, builder: str, holes: bool, rows: list[list[int]], left: int) -> None:
    build, label = BUILDERS[builder]
    width = max(map(len, rows), default=0) + left + 1
    padded = [[OTHER] * left + row + [OTHER] * (width - left - len(row)) for row in rows]
    roles = array(kind, padded, np.int8).reshape(len(rows), width)
    slices = build(roles == MODEL, None if holes else roles == TOOL)
    assert as_labels(slices, (len(rows), width)) == [one for row in padded for one in label(row, holes)]


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("holes", [True, False])
@given(
    rows=sequences, beyond=st.integers(0, 3), by=st.sampled_from(["cu", "cu list", "position_ids"]), flat=st.booleans()
)
def test_packed(kind: str, builder: str, holes: bool, rows: list[list[int]], beyond: int, by: str, flat: bool) -> None:
    build, label = BUILDERS[builder]
    packed = [role for row in rows for role in row] + [OTHER] * beyond
    shape = (len(packed),) if flat else (1, len(packed))
    roles = array(kind, packed, np.int8).reshape(shape)
    boundaries = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    layout: dict[str, Any] = {"cu_seqlens": array(kind, boundaries, np.int32)}
    if by == "cu list":
        layout = {"cu_seqlens": boundaries.tolist()}
    if by == "position_ids":
        positions = [i for row in rows for i in range(len(row))] + list(range(beyond))
        layout = {"position_ids": array(kind, positions, np.int64).reshape(shape)}
    slices = build(roles == MODEL, None if holes else roles == TOOL, **layout)
    assert as_labels(slices, shape) == [one for row in rows for one in label(row, holes)] + [None] * beyond


@pytest.mark.parametrize("padding", [0, 1])
def test_response_mask_is_the_convention_of_trl(padding: int) -> None:
    # [model model TOOL TOOL model], [model model] and padding, whose tool_mask is 0 or 1
    tool_mask = torch.tensor([[1, 1, 0, 0, 1], [1, 1, padding, padding, padding]])
    completion_mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    slices = tool_slices(tool_mask, response_mask=completion_mask)
    assert slices.ids.tolist() == [[1, 1, -1, -1, 2], [0, 0, -1, -1, -1]]
    assert slices.ids.dtype == torch.int8


def test_rounds_of_a_response_mask() -> None:
    slices = turn_slices(np.array([1, 1, 1, 0, 0, 1, 1, 0, 1, 1]), buckets=(0, 1, 2, 3))
    assert slices.names == ("turn_0", "turn_1", "turn_2", "turn_3_up")
    assert slices.ids.tolist() == [0, 0, 0, -1, -1, 1, 1, -1, 2, 2]


def test_a_tool_token_inside_the_model_mask_is_the_tools() -> None:
    slices = tool_slices(np.array([1, 1, 1, 1]), np.array([0, 1, 1, 0]))
    assert slices.ids.tolist() == [1, -1, -1, 2]


def test_a_result_that_ends_the_trajectory_needs_the_tool_mask() -> None:
    model, tool = np.array([1, 1, 0, 0]), np.array([0, 0, 1, 0])
    assert tool_slices(model).ids.tolist() == [0, 0, -1, -1]
    assert tool_slices(model, tool).ids.tolist() == [1, 1, -1, -1]
    assert tool_call_slices(model, tool).ids.tolist() == [0, 0, -1, -1]


def test_tool_call_tokens_by_mask() -> None:
    slices = tool_call_slices(np.array([1, 1, 0, 1]), call_mask=np.array([0, 1, 1, 0]))
    assert slices.ids.tolist() == [1, 0, -1, 1]


def test_position_buckets() -> None:
    slices = position_slices(torch.tensor([0, 1, 0, 1, 1, 1, 1]), buckets=(0, 1, 3))
    assert slices.names == ("position_0", "position_1_2", "position_3_up")
    assert slices.ids.tolist() == [-1, 0, -1, 1, 1, 2, 2]


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_staleness_by_token_sequence_and_segment(kind: str) -> None:
    versions = array(kind, [10, 9, 8, 7, 6, 3, 2, -1, 11], np.int32)
    assert staleness_slices(10, versions).ids.tolist() == [0, 1, 2, 3, 4, 4, 5, -1, 0]
    assert staleness_slices(10, versions[:, None]).ids.shape == (9, 1)
    by_sequence = staleness_slices(
        10, array(kind, [10, 9, 0], np.int64), cu_seqlens=array(kind, [0, 2, 2, 5], np.int32), n_tokens=7
    )
    assert by_sequence.ids.tolist() == [0, 0, 5, 5, 5, -1, -1]
    by_segment = staleness_slices(
        5,
        array(kind, [[5, 4], [3, 0]], np.int64),
        cu_seqlens=array(kind, [[0, 1, 3], [2, 4, 4]], np.int64),
        n_tokens=4,
    )
    assert by_segment.ids.tolist() == [[0, 1, 1, -1], [-1, -1, 2, 2]]
    assert by_segment.names == ("stale_0", "stale_1", "stale_2", "stale_3", "stale_4_7", "stale_8_up")


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@given(
    lengths=st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=1, max_size=4),
    first=st.integers(0, 3),
    n_tokens=st.integers(0, 14),
)
def test_segments_of_rows(kind: str, lengths: list[list[int]], first: int, n_tokens: int) -> None:
    rows = len(lengths)
    boundaries = np.cumsum([[first, *row] for row in lengths], axis=1)
    versions = np.arange(3 * rows).reshape(rows, 3)
    slices = staleness_slices(
        3 * rows,
        array(kind, versions, np.int64),
        buckets=range(3 * rows + 1),
        cu_seqlens=array(kind, boundaries, np.int64),
        n_tokens=n_tokens,
    )
    wanted = np.full((rows, n_tokens), -1)
    for row in range(rows):
        for segment in range(3):
            wanted[row, boundaries[row, segment] : boundaries[row, segment + 1]] = 3 * rows - versions[row, segment]
    assert np.array_equal(np.asarray(slices.ids), wanted)


def test_staleness_against_a_version_on_the_device() -> None:
    assert staleness_slices(torch.tensor(7), torch.tensor([7, 0], dtype=torch.uint8)).ids.tolist() == [0, 4]


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_advantage_signs(kind: str) -> None:
    advantages = array(kind, [0.5, -0.0, -2.0, np.nan], np.float32)
    assert advantage_sign_slices(advantages).ids.tolist() == [0, 1, 2, -1]
    packed = advantage_sign_slices(advantages, cu_seqlens=[0, 1, 1, 3, 4], n_tokens=5)
    assert packed.ids.tolist() == [0, 2, 2, -1, -1]


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_groups(kind: str) -> None:
    ids = array(kind, [0, 1, -1, 2, 0], np.int16)
    assert group_slices(ids, ["math", "code"]).ids.tolist() == [0, 1, -1, -1, 0]
    others = group_slices(ids, ["math", "code"], other="rest")
    assert others.names == ("math", "code", "rest")
    assert others.ids.tolist() == [0, 1, -1, 2, 0]
    assert group_slices(ids, {"code": 2, "math": 1}).ids.tolist() == [-1, 1, -1, 0, -1]


def test_groups_from_strings() -> None:
    sources = ["gsm8k", "code", "gsm8k", "web"]
    rows = group_slices(sources, ["gsm8k", "code"], device="cpu")
    assert isinstance(rows.ids, torch.Tensor)
    assert rows.ids.tolist() == [[0], [1], [0], [-1]]
    packed = group_slices(np.array(sources), ["gsm8k", "code"], other="rest", cu_seqlens=[0, 1, 3, 3, 4], n_tokens=4)
    assert packed.ids.tolist() == [0, 1, 1, 2]


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_combinations(kind: str) -> None:
    model = array(kind, [[1, 1, 0, 1, 1], [1, 1, 1, 0, 0]], np.int8)
    tool = tool_slices(model)
    sign = advantage_sign_slices(array(kind, [[1.0], [-1.0]], np.float32))
    both = tool & sign
    assert len(both.names) == 9
    assert both.names[:2] == ("text__adv_positive", "text__adv_zero")
    for name in both:
        one, two = name.split("__")
        assert np.array_equal(np.asarray(both[name]), np.asarray(tool[one] & sign[two]))
    first_row = array(kind, [[True], [False]], bool)
    for kept in (tool & first_row, first_row & tool):
        assert np.array_equal(np.asarray(kept.ids), np.where(np.asarray(first_row), np.asarray(tool.ids), -1))
    assert np.array_equal(np.asarray(~tool), np.asarray(model) == 0)
    joined = tool | {"late": tool["post_tool"] & ~tool["text"]}
    assert list(joined) == ["text", "pre_tool", "post_tool", "late"]
    assert list({"late": joined["late"]} | tool) == ["late", "text", "pre_tool", "post_tool"]
    with pytest.raises(ValueError, match="both sides"):
        tool | {"text": model}


def test_many_names_take_wider_ids() -> None:
    many = group_slices(np.arange(200), [f"g{i}" for i in range(200)])
    assert many.ids.dtype == np.int16
    product = many & many
    assert product.ids.dtype == np.int32
    assert product.ids.tolist() == [201 * i for i in range(200)]


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_ids_masks_and_pooled_products_agree(kind: str, rng: np.random.Generator, oracle: Any) -> None:
    shape = (6, 40)
    logp = array(kind, rng.normal(size=shape), np.float32)
    old = array(kind, rng.normal(size=shape), np.float32)
    tool = tool_slices(array(kind, rng.random(shape) < 0.8, bool))
    age = staleness_slices(9, array(kind, rng.integers(0, 10, (6, 1)), np.int64))
    both = tool & age
    by_ids = pyrlstats.slice_stats(logp, old, slice_ids=both.ids, names=both.names)
    by_masks = pyrlstats.slice_stats(logp, old, both)
    marginal = pool(by_ids, {name: [one for one in both if one.startswith(name + "__")] for name in tool})
    direct = pyrlstats.slice_stats(logp, old, slice_ids=tool.ids, names=tool.names)
    for slices, found in ((both, (by_ids, by_masks)), (tool, (marginal, direct))):
        wanted = oracle.state(logp, old, slices)
        size = oracle.state(abs(logp - old), 0 * old, slices)
        for one in found:
            oracle.check(one.state.to_host(), wanted, size, parts=promises.OTHER)


def test_pool_keeps_what_is_out_of_range_and_refuses_unknown_slices() -> None:
    x = np.array([0.1, 0.2, 0.3, 0.4], np.float32)
    stats = pyrlstats.slice_stats(x, np.zeros(4, np.float32), slice_ids=np.array([0, 1, 2, 7]), names=["a", "b", "c"])
    pooled = pool(stats, {"c and a": ["c", "a"], "a": ["a"], "b": ["b"]})
    assert [int(view.n_tokens) for view in pooled.values()] == [2, 1, 1]
    assert int(pooled.n_out_of_range) == 1
    assert float(pooled["c and a"].log_ratio_max) == float(np.float32(0.3))
    with pytest.raises(KeyError, match="unknown slices"):
        pool(stats, {"x": ["d"]})
    with pytest.raises(ValueError, match="at least one slice"):
        pool(stats, {"x": []})


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (1, 0)])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_no_tokens(kind: str, shape: tuple[int, ...]) -> None:
    mask = array(kind, np.zeros(shape), bool)
    positions = array(kind, np.zeros(shape), np.int64)
    for build, _ in BUILDERS.values():
        for layout in ({}, {"position_ids": positions}):
            assert tuple(build(mask, **layout).ids.shape) == shape
            assert tuple(build(mask, mask, **layout).ids.shape) == shape


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tool_slices(np.ones((2, 3)), np.ones((2, 2))), r"tool_mask must broadcast to model_mask's shape"),
        (lambda: tool_slices(np.ones(3), np.ones(3), response_mask=np.ones(3)), "exclude each other"),
        (lambda: tool_slices(np.ones(3), cu_seqlens=[0, 3], position_ids=np.zeros(3, int)), "exclude each other"),
        (lambda: tool_slices(np.ones((2, 3)), cu_seqlens=[0, 6]), r"packed mask of shape \[N\] or \[1, N\]"),
        (lambda: tool_slices(np.array(1.0)), "last axis"),
        (lambda: turn_slices(np.ones(3), buckets=(0, 2, 2)), "strictly ascending"),
        (lambda: position_slices(np.ones(3), first=0), "first must be at least 1"),
        (lambda: staleness_slices(1, np.ones(3, int), cu_seqlens=[0, 1, 2, 3]), "go together"),
        (lambda: staleness_slices(1, np.ones(3, int), cu_seqlens=[0, 3], n_tokens=3), "one boundary more"),
        (lambda: group_slices(np.ones(3, int), ["a", "a"]), "given twice"),
    ],
)
def test_errors_say_what_is_wrong(call: Callable[[], Slices], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_versions_must_be_integers() -> None:
    with pytest.raises(TypeError, match="versions must have one of the dtypes"):
        staleness_slices(1, np.ones(3, np.float32))


def test_slices_compile_without_a_graph_break() -> None:
    def ids(mask: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        both = tool_slices(mask, cu_seqlens=cu_seqlens) & turn_slices(mask, mask == 0, cu_seqlens=cu_seqlens)
        return both.ids

    mask, boundaries = torch.tensor([1, 0, 1, 1, 0, 1, 1, 0]), torch.tensor([0, 3, 8])
    compiled = torch.compile(ids, backend="aot_eager", fullgraph=True)
    assert compiled(mask, boundaries).tolist() == ids(mask, boundaries).tolist()


@pytest.mark.parametrize("buckets", [(0, 1.9), (0.0, 1.0), ("0", "1")])
def test_buckets_must_be_integers(buckets: Any) -> None:
    with pytest.raises(TypeError, match="buckets must be integers"):
        turn_slices(np.ones(3), buckets=buckets)
    assert turn_slices(np.ones(3), buckets=np.array([0, 2])).names == ("turn_0_1", "turn_2_up")
