"""What is special to the compiled CPU engine: instruction sets, memory layouts, threads, forks, the build."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import promises
import pytest
import torch

from pyrlstats import _core, reference
from pyrlstats.backends import cpp
from pyrlstats.backends.batch import Batch
from pyrlstats.layout import COUNTS, MAXIMA, SUMS, Layout, clip_thresholds
from pyrlstats.state import State

CLIP = (0.2, 0.2)
ROOT = Path(__file__).parent.parent
ISAS = cpp.instruction_sets()


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def numpy_of(array: Any) -> np.ndarray:
    if isinstance(array, np.ndarray):
        return array
    return (array.float() if array.dtype == torch.bfloat16 else array).numpy()


def run(
    logp: Any,
    old_logp: Any,
    masks: Sequence[Any] | None = None,
    slice_ids: Any = None,
    base_mask: Any = None,
    *,
    isa: str = "",
    slices: int | None = None,
    layout: Layout | None = None,
    threads: int = 1,
    clip: tuple[float, float] = CLIP,
    into: State | None = None,
) -> State:
    count = slices or (1 if masks is None else len(masks))
    state = into or State.empty([f"s{i}" for i in range(count)], layout or Layout(), clip)
    batch = Batch(logp, old_logp, None if masks is None else tuple(masks), slice_ids, base_mask)
    cpp.accumulate(batch, state, threads, isa)
    return state


def expected(
    x: np.ndarray,
    members: Sequence[np.ndarray],
    out_of_range: int = 0,
    layout: Layout | None = None,
    clip: tuple[float, float] = CLIP,
) -> State:
    state = State.empty([f"s{i}" for i in range(len(members))], layout or Layout(), clip)
    for s, mask in enumerate(members):
        row = reference.accumulate(x[mask], state.layout, clip)
        state.histogram[s] = row["histogram"]
        for names, rows in ((COUNTS, state.counts), (SUMS, state.sums), (MAXIMA, state.maxima)):
            rows[s] = [row[name] for name in names]
    state.counts[0, COUNTS.index("n_out_of_range")] = out_of_range
    return state


def check(oracle: Any, state: State, x: np.ndarray, members: Sequence[np.ndarray], out_of_range: int = 0) -> None:
    __tracebackhide__ = True
    x = x.ravel()
    members = [mask.ravel() for mask in members]
    wanted = expected(x, members, out_of_range, state.layout, state.clip)
    magnitudes = expected(np.abs(x), members, out_of_range, state.layout, state.clip)
    oracle.check(state, wanted, magnitudes, parts=promises.OTHER)


def bits(*patterns: int) -> np.ndarray:
    return np.array(patterns, np.uint32).view(np.float32)


SPECIAL = bits(
    *(0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x0000FFFF, 0x00010000),
    *(0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFBFFFFF),
    *(0x3EFFFFFF, 0x3F000000, 0x3F000001, 0xBF000000, 0x2B7FFFFF, 0x2B800000, 0x33800000, 0x337FFFFF),
)


def edges(layout: Layout) -> np.ndarray:
    inner = np.array(layout.abs_edges[1:-1], np.float32).view(np.int32)
    around = np.concatenate([inner - 1, inner, inner + 1]).view(np.float32)
    return np.concatenate([around, -around])


def data(kind: str, n: int, rng: np.random.Generator) -> np.ndarray:
    """x of one kind, float32 (n,)."""
    if kind == "special":
        x = rng.choice(SPECIAL, n)
    elif kind == "edges":
        x = rng.choice(edges(Layout()), n)
    elif kind == "bits":
        x = rng.integers(0, 1 << 32, n, np.uint32).view(np.float32)
    elif kind == "mixed":
        scale = rng.choice([1e-20, 1e-5, 0.01, 1.0, 30.0], n)
        x = np.where(rng.random(n) < 0.02, rng.choice(SPECIAL, n), rng.normal(0, 1, n) * scale)
    elif kind == "far and near":
        x = np.where(rng.random(n) < 0.3, rng.choice([-300.0, 50.0, 0.6, -2.0], n), rng.normal(0, 0.01, n))
    elif kind == "side by side":  # at the limits between the kernel's ways
        limits = np.array([0.125, 0.5, 40.0, 64.0, 2.0**-31], np.float32).view(np.int32)
        around = np.concatenate([limits - 1, limits, limits + 1]).view(np.float32)
        some = rng.random(n) < np.repeat(rng.choice([0.001, 0.02, 0.5], n // 500 + 1), 500)[:n]
        x = np.where(some, rng.choice(np.concatenate([around, -around, [0.0]]), n), rng.normal(0, 0.01, n))
    elif kind == "growing":  # the scale of the far weights changes all the time
        x = np.linspace(-700, 5000, n)
    elif kind == "one sign":  # every group holds what may be a new minimum or maximum
        x = rng.choice([-1.0, 1.0]) * np.abs(rng.normal(0, rng.choice([0.01, 0.1, 0.4]), n))
    elif kind == "clipped":
        x = rng.choice([*clip_thresholds(CLIP), 0.0], n).astype(np.float32)
        x = (x.view(np.int32) + rng.integers(-1, 2, n)).astype(np.int32).view(np.float32)
    elif kind == "laplace":
        x = rng.laplace(0, 1, n)
    elif kind == "half zero":
        x = np.where(rng.random(n) < 0.5, 0.0, rng.normal(0, 0.01, n))
    else:
        x = np.full(n, float(kind))
    return x.astype(np.float32)


KINDS = (
    *(
        "special",
        "edges",
        "bits",
        "mixed",
        "far and near",
        "side by side",
        "growing",
        "one sign",
        "clipped",
        "laplace",
        "half zero",
    ),
    *("0", "1e-41", "1e-9", "6e-8", "0.3", "0.5", "50", "-300", "5000", "-5000", "1e30", "-3.4028235e38"),
)


def memberships(kind: str, n: int, rng: np.random.Generator) -> list[np.ndarray]:
    if kind == "one":
        return [np.ones(n, bool)]
    if kind == "random":
        return [rng.random(n) < p for p in (0.5, 0.9, 0.02, 0.5)]
    count = int(kind)  # overlapping runs
    keys = [[bool(rng.random() < 0.3) for _ in range(count)] for _ in range(40)]
    runs = np.repeat(rng.integers(0, 40, n // 30 + 1), rng.integers(1, 200, n // 30 + 1))
    runs = np.resize(runs, n)
    return list(np.array(keys)[runs].T)


@pytest.mark.parametrize("kind", KINDS)
def test_data(isa: str, kind: str, rng: np.random.Generator, oracle: Any) -> None:
    n = 5000
    x = data(kind, n, rng)
    for shape in ("one", "random", "4", "32", "40", "70"):
        members = memberships(shape, n, rng)
        check(oracle, run(x, np.zeros_like(x), members, isa=isa), x, members)
    ids = rng.integers(-1, 9, n).astype(np.int8)
    state = run(x, np.zeros_like(x), slice_ids=ids, slices=8, isa=isa)
    check(oracle, state, x, [ids == s for s in range(8)], int(np.sum(ids == 8)))


@pytest.mark.parametrize("n", [0, 1, 2, 63, 64, 65, 127, 1000, 4095, 4096, 4097, 8191, 8192, 8193, 16384, 16385, 70001])
def test_sizes(isa: str, n: int, rng: np.random.Generator, oracle: Any) -> None:
    x = data("mixed", n, rng)
    masks = [np.ones(n, bool), rng.random(n) < 0.5, np.zeros(n, bool)]
    check(oracle, run(x, np.zeros_like(x), masks, isa=isa), x, masks)
    check(oracle, run(x, np.zeros_like(x), isa=isa), x, masks[:1])


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.parametrize("first", DTYPES, ids=str)
@pytest.mark.parametrize("second", DTYPES, ids=str)
def test_dtypes(isa: str, first: torch.dtype, second: torch.dtype, rng: np.random.Generator, oracle: Any) -> None:
    n = 5003
    old = torch.from_numpy(rng.normal(-1, 0.5, n))
    logp = old + torch.from_numpy(rng.normal(0, 0.1, n))
    for value in (float("nan"), float("inf"), -float("inf"), 1e300, -1e300, 6e-8, 0.0, 65504.0):
        logp[rng.integers(0, n, 5)] = value
        old[rng.integers(0, n, 5)] = value
    logp, old = logp.to(first), old.to(second)
    with np.errstate(over="ignore"):
        x = reference.log_ratio(numpy_of(logp), numpy_of(old))
    mask = torch.from_numpy(rng.random(n) < 0.7)
    state = run(logp, old, [mask, ~mask], isa=isa)
    check(oracle, state, x, [mask.numpy(), ~mask.numpy()])


def test_float16_is_exact(isa: str, oracle: Any) -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    x = reference.log_ratio(every, np.zeros_like(every))
    check(oracle, run(every, np.zeros_like(every), isa=isa), x, [np.ones(every.size, bool)])


MASK_DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)


@pytest.mark.parametrize("dtype", MASK_DTYPES, ids=str)
def test_mask_dtypes(isa: str, dtype: torch.dtype, rng: np.random.Generator, oracle: Any) -> None:
    n = 4500
    x = data("mixed", n, rng)
    values = [0.0, 1.0] if dtype == torch.bool else [0, 0, 1, 2, 127] if dtype == torch.uint8 else [0, 0, 1, -1, 64]
    if dtype.is_floating_point:
        values = [0.0, -0.0, 1.0, -1.0, float("nan"), float("inf"), 6e-8]
    mask = torch.tensor(rng.choice(values, n)).to(dtype)
    if dtype in (torch.int16, torch.int32, torch.int64):
        mask[:100] = torch.iinfo(dtype).min  # only the top bit is set
    member = (mask != 0).numpy()
    state = run(torch.from_numpy(x), torch.zeros(n), [mask], isa=isa)
    check(oracle, state, x, [member])
    state = run(torch.from_numpy(x), torch.zeros(n), base_mask=mask, isa=isa)
    check(oracle, state, x, [member])


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"])
def test_slice_ids(isa: str, dtype: str, rng: np.random.Generator, oracle: Any) -> None:
    n = 4500
    x = data("mixed", n, rng)
    info = np.iinfo(dtype)
    runs = np.repeat(rng.integers(0, 8, n // 50), 100)[:n]
    wild = rng.choice(np.array([info.min, info.max, 7, 8, 0], dtype), n)
    ids = np.where(rng.random(n) < rng.choice([0.0, 0.01, 0.5]), wild, runs.astype(dtype)).astype(dtype)
    base = rng.random(n) < 0.9
    beyond = int(np.sum(base & (ids >= 8)))
    state = run(x, np.zeros_like(x), slice_ids=ids, base_mask=base, slices=8, isa=isa)
    check(oracle, state, x, [base & (ids == s) for s in range(8)], beyond)


def test_wide_slice_ids_do_not_wrap(isa: str, oracle: Any) -> None:
    x = np.full(300, 0.25, np.float32)
    ids = np.array([2**32, 2**32 + 1, 2**63 - 1], np.int64)[np.arange(300) % 3]
    state = run(x, np.zeros_like(x), slice_ids=ids, slices=2, isa=isa)
    check(oracle, state, x, [np.zeros(300, bool)] * 2, 300)


def views(base: np.ndarray) -> dict[str, np.ndarray]:
    """Arrays of one shape and the same memory order problems as users' slices."""
    rows, columns = 37, 151
    return {
        "transposed": base[: rows * columns].reshape(columns, rows).T,
        "shifted": base[: rows * (columns + 1)].reshape(rows, columns + 1)[:, 1:],
        "every other": base[: rows * columns * 2].reshape(rows, columns * 2)[:, ::2],
        "reversed": base[: rows * columns].reshape(rows, columns)[::-1, ::-1],
        "row": np.broadcast_to(base[:columns], (rows, columns)),
        "column": np.broadcast_to(base[:rows, None], (rows, columns)),
        "scalar": np.broadcast_to(base[:1, None], (rows, columns)),
    }


@pytest.mark.parametrize("dtype", ["f4", "f2", "f8"])
def test_strides(isa: str, dtype: str, rng: np.random.Generator, oracle: Any) -> None:
    with np.errstate(over="ignore"):
        logps = views(data("mixed", 20000, rng).astype(dtype))
    olds = views(rng.normal(0, 0.1, 20000).astype(dtype))
    masks = views(rng.random(20000) < 0.5)
    names = list(logps)
    for i, name in enumerate(names):
        logp, old = logps[name], olds[names[(i + 1) % len(names)]]
        mask, base = masks[names[(i + 2) % len(names)]], masks[names[(i + 3) % len(names)]]
        x = reference.log_ratio(logp, old)
        check(oracle, run(logp, old, [mask, ~mask], None, base, isa=isa), x, [mask & base, ~mask & base])


def test_torch_strides_and_many_dimensions(isa: str, rng: np.random.Generator, oracle: Any) -> None:
    whole = torch.from_numpy(data("mixed", 4 * 6 * 5 * 7 * 9, rng)).reshape(4, 6, 5, 7, 9)
    logp = whole.permute(3, 0, 4, 1, 2)[:, ::2]
    old = torch.zeros(()).expand(logp.shape)
    mask = torch.from_numpy(rng.random((1, logp.shape[2], 1, 5)) < 0.5).expand(logp.shape)
    state = run(logp, old, [mask], isa=isa)
    check(oracle, state, logp.numpy(), [mask.numpy()])


def test_masked_out_values_take_no_part(isa: str, rng: np.random.Generator, oracle: Any) -> None:
    n = 3000
    x = data("0.3", n, rng)
    mask = rng.random(n) < 0.5
    x[~mask] = rng.choice(SPECIAL, n)[~mask]
    check(oracle, run(x, np.zeros_like(x), [mask], isa=isa), x, [mask])


LAYOUTS = (
    *(Layout(0, -126, 2), Layout(5, -126, -62), Layout(7, -24, 8), Layout(5, -24, 40), Layout(3, 0, 128)),
    *(Layout(8, -24, 8), Layout(10, -24, 40), Layout(0, -1, 0), Layout(5, -64, -32), Layout(6, 20, 52)),
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts(isa: str, layout: Layout, rng: np.random.Generator, oracle: Any) -> None:
    for kind in ("bits", "mixed", "half zero"):
        x = np.concatenate([data(kind, 3000, rng), edges(layout)[:20000]])
        masks = [np.ones(x.size, bool), rng.random(x.size) < 0.5]
        check(oracle, run(x, np.zeros_like(x), masks, isa=isa, layout=layout), x, masks)


def test_wide_bins_with_many_tokens(isa: str, rng: np.random.Generator, oracle: Any) -> None:
    x = rng.normal(size=300_000).astype(np.float32)
    check(oracle, run(x, np.zeros_like(x), isa=isa, layout=Layout(8)), x, [np.ones(x.size, bool)])


def test_extrema_beside_exact_zeros(isa: str, oracle: Any) -> None:
    for sign in (1.0, -1.0):
        x = np.repeat(np.array([1.25, 0.0, -0.0005, 0.0], np.float32) * np.float32(sign), [27, 37, 13, 51])
        check(oracle, run(x, np.zeros_like(x), isa=isa), x, [np.ones(x.size, bool)])


@pytest.mark.parametrize("layout", [Layout(), Layout(10)], ids=str)
def test_kinds_of_calls_in_turn(isa: str, layout: Layout, rng: np.random.Generator, oracle: Any) -> None:
    """Calls of one size with masks, without, by id and with a base mask share a workspace's memory."""
    for _ in range(40):
        n, slices = int(rng.choice([64, 3000, 20_000])), int(rng.choice([1, 2, 5]))
        x = data("mixed", n, rng)
        zeros = np.zeros_like(x)
        masks = [rng.random(n) < rng.random() for _ in range(slices)]
        base = rng.random(n) < 0.7
        ids = rng.integers(-1, slices + 1, n)
        options = {"isa": isa, "layout": layout}
        check(oracle, run(x, zeros, masks, **options), x, masks)
        check(oracle, run(x, zeros, **options), x, [np.ones(n, bool)])
        check(oracle, run(x, zeros, base_mask=base, **options), x, [base])
        by_id = run(x, zeros, slice_ids=ids, base_mask=base, slices=slices, **options)
        beyond = int(np.count_nonzero(base & (ids >= slices)))
        check(oracle, by_id, x, [base & (ids == index) for index in range(slices)], beyond)


@pytest.mark.parametrize("clip", [(0.9, 5.0), (1e-6, 1e-6), (1e-50, 1e-50), (0.5, 0.01)])
def test_clips(isa: str, clip: tuple[float, float], rng: np.random.Generator, oracle: Any) -> None:
    x = data("mixed", 5000, rng)
    check(oracle, run(x, np.zeros_like(x), isa=isa, clip=clip), x, [np.ones(x.size, bool)])


def test_accumulates_into_a_state(isa: str, rng: np.random.Generator, oracle: Any) -> None:
    parts = [data(kind, 3000, rng) for kind in ("laplace", "50", "-300", "0", "5000", "laplace")]
    masks = [[rng.random(3000) < 0.5 for _ in range(2)] for _ in parts]
    state = None
    for x, mask in zip(parts, masks, strict=True):
        state = run(x, np.zeros_like(x), mask, isa=isa, into=state)
    assert state is not None
    members = [np.concatenate([mask[s] for mask in masks]) for s in range(2)]
    check(oracle, state, np.concatenate(parts), members)


@pytest.mark.parametrize("kind", ["laplace", "mixed", "side by side"])
def test_same_bits_for_any_number_of_threads(isa: str, kind: str, rng: np.random.Generator, oracle: Any) -> None:
    n = 1_500_000
    x = data(kind, n, rng)
    masks = memberships("4", n, rng)
    states = [run(x, np.zeros_like(x), masks, isa=isa, threads=threads) for threads in (1, 2, 3, 16, 1)]
    for state in states[1:]:
        assert np.array_equal(state.buffer, states[0].buffer)
    check(oracle, states[0], x, masks)


LENGTHS = (1, 63, 64, 65, 128, 1000, 8192, 16384)  # with the borders of groups, blocks and chunks


def in_stretches(n: int, values: Sequence[Any], rng: np.random.Generator) -> np.ndarray:
    """(n,): each of `values`, an array of n or one number, for a while, in any order."""
    out = np.empty(n, np.result_type(*(np.asarray(value).dtype for value in values)))
    begin = 0
    while begin < n:
        end = begin + int(rng.choice(LENGTHS))
        value = values[rng.integers(len(values))]
        out[begin:end] = value[begin:end] if np.ndim(value) else value
        begin = end
    return out


@pytest.mark.parametrize(
    ("n", "count"),
    [*((n, count) for n in (64 * 1200, 64 * 1200 + 17) for count in (0, 1, 3)), (1 << 20, 0), (1 << 20, 2)],
)
def test_runs_and_kinds_of_data_end_anywhere(
    isa: str, count: int, n: int, rng: np.random.Generator, oracle: Any
) -> None:
    kinds = ("0", "laplace", "far and near", "0.3", "-39.9", "40", "half zero", "one sign", "0.01")
    for based in (False, True):
        x = in_stretches(n, [data(kind, n, rng) for kind in kinds], rng)
        given = [in_stretches(n, [0, 1, 2, 255, rng.integers(0, 3, n)], rng).astype(np.uint8) for _ in range(count)]
        base = in_stretches(n, [0, 1, 1, 7], rng).astype(np.uint8) if based else None
        keep = np.ones(n, bool) if base is None else base != 0
        state = run(x, np.zeros_like(x), given or None, base_mask=base, isa=isa)
        check(oracle, state, x, [(mask != 0) & keep for mask in given] or [keep])


@pytest.mark.parametrize("scale", [0.01, 0.1, 1.0])
def test_same_bits_for_any_form(isa: str, scale: float, rng: np.random.Generator) -> None:
    """Of float32: not the type of a mask decides, nor whether arrays lie in order in memory."""
    n = 30_016
    x = rng.laplace(0, scale, n).astype(np.float32)
    zeros = np.zeros_like(x)
    first, second = memberships("2", n, rng)
    other = first * rng.integers(1, 256, n).astype(np.uint8)  # non-zero where it was True
    strided = np.repeat(first, 3)[::3]
    unaligned = np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(np.float32)
    for ways in (
        [(first, second), (first.astype(np.int64), second), (strided, second), (other, second.astype(np.float16))],
        [(first,), (other,), (strided,), (first.astype(np.float32),)],
        [None, (np.ones(n, bool),), (np.ones(1, np.int64),)],
    ):
        wanted = run(x, zeros, ways[0], isa=isa).buffer
        for way in ways:
            masks = None if way is None else [np.broadcast_to(mask, x.shape) for mask in way]
            for form in (x, np.repeat(x, 2)[::2], unaligned):
                assert np.array_equal(run(form, zeros, masks, isa=isa).buffer, wanted)


def test_as_many_masks_as_a_key_has_bits(isa: str, rng: np.random.Generator, oracle: Any) -> None:
    """Tokens in every slice but one, or in all: sets whose keys are all ones but for a bit."""
    x = data("mixed", 5000, rng)
    for count in (62, 63, 64, 65, 128):
        for empty in (None, 0, 1, 62, 63):
            members = [np.full(x.size, s != empty) for s in range(count)]
            check(oracle, run(x, np.zeros_like(x), members, isa=isa), x, members)


@pytest.mark.parametrize("value", [0.3, -0.3, 0.01, -2.0, 45.0])
def test_the_last_group_of_a_chunk_has_no_extrema_of_its_own(isa: str, value: float, oracle: Any) -> None:
    """Its padding is zeros, and a later chunk of the thread has nothing but zeros: they are the other extremum."""
    for size in (5, 40, 64, 70):
        x = np.zeros(200_000, np.float32)
        x[:size] = value
        members = np.zeros(x.size, bool)
        members[:size] = members[16384:16448] = members[150_000:150_064] = True
        ids = np.where(members, 0, -1)
        check(oracle, run(x, np.zeros_like(x), [members], isa=isa), x, [members])
        check(oracle, run(x, np.zeros_like(x), slice_ids=ids, slices=1, isa=isa), x, [members])
        for threads in (1, 2, 3):
            state = run(x, np.zeros_like(x), isa=isa, threads=threads)
            check(oracle, state, x, [np.ones(x.size, bool)])


def test_equal_tokens(isa: str, rng: np.random.Generator, oracle: Any) -> None:
    """Where all round alike nothing averages out: each way's bound must hold of one token."""
    near = np.concatenate([rng.uniform(-0.5, 0.5, 30), rng.uniform(0.3, 0.5, 15), rng.uniform(-0.125, 0.125, 15)])
    size = np.exp(rng.uniform(np.log(0.5), np.log(40.0), near.size)) * rng.choice([-1.0, 1.0], near.size)
    for here, there in zip(near, size, strict=True):
        alone = np.full(3000, here, np.float32)
        check(oracle, run(alone, np.zeros_like(alone), isa=isa), alone, [np.ones(alone.size, bool)])
        beside = np.where(rng.random(3000) < 0.4, there, here).astype(np.float32)
        masks = [beside == np.float32(here), beside != np.float32(here), np.ones(beside.size, bool)]
        check(oracle, run(beside, np.zeros_like(beside), masks, isa=isa), beside, masks)
        check(oracle, run(beside, np.zeros_like(beside), isa=isa), beside, masks[2:])


def test_records_do_not_change_the_bits(isa: str, rng: np.random.Generator) -> None:
    """A thread that has seen a larger x in another chunk sums as one that has not."""
    x = np.concatenate([rng.normal(0, s, 60_000) for s in (1e-4, 0.03, 1e-3, 0.02, 1e-5, 0.1)]).astype(np.float32)
    x += np.linspace(0, 0.05, x.size, dtype=np.float32)
    far = np.where(rng.random(x.size) < 0.01, rng.laplace(0, 1, x.size), x) * np.linspace(0.3, 3, x.size)
    many = np.where(rng.random(x.size) < 0.4, rng.laplace(0, 1, x.size) * np.linspace(1, 3, x.size), x)
    for tokens in (x, far.astype(np.float32), many.astype(np.float32), np.abs(x), -np.abs(many).astype(np.float32)):
        wanted = run(tokens, np.zeros_like(tokens), isa=isa)
        for _ in range(10):
            assert np.array_equal(run(tokens, np.zeros_like(tokens), isa=isa, threads=2).buffer, wanted.buffer)


@pytest.mark.parametrize("calm", [0, 1, 2, 3, 4, 5, 8])
def test_a_group_behind_far_ones_is_summed_alike_with_and_without_a_record(isa: str, calm: int) -> None:
    """A thread that comes from a chunk with larger tokens meets no record in 0.4, one that begins here does."""
    groups = np.full((256, 64), 0.01, np.float32)  # a chunk
    groups[:16, :32], groups[:16, 32:] = 3.0, -0.3
    groups[16 + calm] = 0.4
    here = groups.ravel()
    before = here.copy()
    before[200:202] = -10.0, 10.0
    alone, first, both = (run(x, np.zeros_like(x), isa=isa) for x in (here, before, np.concatenate([before, here])))
    for name in ("near_k3", "near_excess", "abs_x"):
        assert both.sum(name) - first.sum(name) == pytest.approx(alone.sum(name), rel=1e-12)


def test_integers_agree_across_instruction_sets(rng: np.random.Generator) -> None:
    x = data("bits", 100_000, rng)
    masks = memberships("random", x.size, rng)
    states = [run(x, np.zeros_like(x), masks, isa=name) for name in ISAS]
    for state in states[1:]:
        assert np.array_equal(state.counts, states[0].counts)
        assert np.array_equal(state.histogram, states[0].histogram)
        assert np.array_equal(state.maxima, states[0].maxima)


def test_counters_of_sixteen_bits_do_not_overflow(isa: str, oracle: Any) -> None:
    x = np.full(1_200_000, 0.1, np.float32)
    x[-400_000:] = 0.0
    x[-1000:] = 0.2
    masks = [np.arange(x.size) % 1000 < 990, np.ones(x.size, bool)]
    check(oracle, run(x, np.zeros_like(x), masks, isa=isa), x, masks)
    equal = np.full(1 << 20, 0.1, np.float32)  # whole chunks of 64K: exactly as many as the counters hold
    every = np.ones(equal.size, bool)
    for given in (None, [every], [every, every]):
        check(oracle, run(equal, np.zeros_like(equal), given, isa=isa), equal, given or [every])


@pytest.mark.parametrize("layout", [Layout(), Layout(10), Layout(5, -19, -3)], ids=str)
def test_groups_of_every_kind_in_turn(isa: str, layout: Layout, rng: np.random.Generator, oracle: Any) -> None:
    """Calm, wide, clipped, far, zero and tiny tokens by stretches, while 16-bit counters fill up and are flushed."""
    kinds = {
        "calm": lambda n: rng.normal(0, 0.01, n),
        "wide": lambda n: np.where(rng.random(n) < 0.02, 0.15, rng.normal(0, 0.01, n)),
        "clipped": lambda n: rng.normal(0, 0.12, n).clip(-0.499, 0.499),
        "some far": lambda n: np.where(rng.random(n) < 0.01, rng.laplace(0, 1, n), rng.normal(0, 0.01, n)),
        "far": lambda n: rng.laplace(0, 1, n),
        "all far": lambda n: rng.choice([-1.0, 1.0], n) * rng.uniform(0.5, 90.0, n),
        "zero": np.zeros,
        "tiny": lambda n: rng.normal(0, 1, n) * 10.0 ** rng.uniform(-44, -20, n),
    }
    stretches = [kinds[kind](int(rng.integers(1, 3000))) for kind in rng.choice(list(kinds), 300)]
    x = np.concatenate([kinds["far"](300_000), *stretches]).astype(np.float32)
    masks = [np.ones(x.size, bool), np.arange(x.size) % 1000 < 990]
    check(oracle, run(x, np.zeros_like(x), masks[:1], isa=isa, layout=layout), x, masks[:1])
    check(oracle, run(x, np.zeros_like(x), masks, isa=isa, layout=layout), x, masks)


@pytest.mark.parametrize(
    ("first", "second", "rest", "beside_far"),
    [
        (39.1642494, 30.842041, 30.1488934, False),  # exp(2 x)
        (39.5164986, 22.8678398, 21.4815445, False),  # exp(x)
        (15.596890449523926, 7.278045177459717, 6.584897994995117, False),  # exp(2 x), and n ln 2
        (-0.260928988, -6.08523915e-5, -3.04260411e-5, True),  # k3 of near ones
    ],
)
def test_every_addition_rounds_the_same_way(
    isa: str, first: float, second: float, rest: float, beside_far: bool, oracle: Any
) -> None:
    """Lanes of sixteen tokens, a large one and many just above half its last bit, beside far ones."""
    for lanes in (4, 8, 16):
        group = np.repeat(np.array([first] + 3 * [second] + 12 * [rest], np.float32), lanes).reshape(16, lanes)
        if beside_far:
            group[:, : lanes // 4] = 0.75
        x = np.tile(group.ravel(), 64)
        state = run(x, np.zeros_like(x), isa=isa)
        check(oracle, state, x, [np.ones(x.size, bool)])
        square = float(np.sum(np.expm1(x[np.abs(x) < 0.5].astype(np.float64)) ** 2))
        found = float(state.sum("near_x2")[0] + state.sum("near_excess")[0])
        assert found == pytest.approx(square, rel=promises.OTHER)


@pytest.mark.parametrize(
    "size", [1e-40, 1e-30, 1e-5, 0.01, 0.124, 0.126, 0.3, 0.4999, 0.5, 0.65, 1.1, 15.59689, 39.9, 40.3, 63.9, 64.1]
)
def test_equal_tokens_of_every_size(isa: str, size: float, oracle: Any) -> None:
    """What rounds one token rounds them all: no sum may add that up, whichever path the tokens take."""
    for value in (size, -size):
        x = np.full(1000, value, np.float32)
        check(oracle, run(x, np.zeros_like(x), isa=isa), x, [np.ones(x.size, bool)])


@pytest.mark.parametrize("exponent", [-33, -32, -31, -30, -27, -24, -18])
def test_a_tiny_token_alone_among_zeros(isa: str, exponent: int, oracle: Any) -> None:
    """Sums of high powers begin above zero; nothing of that may be seen in what a lone token leaves."""
    for value in (2.0**exponent, -1.3 * 2.0**exponent):
        for n in (64, 3 * 16 * 1024):  # one group; a token in each of three chunks
            x = np.zeros(n, np.float32)
            x[:: 16 * 1024] = value
            state = run(x, np.zeros_like(x), isa=isa)
            check(oracle, state, x, [np.ones(n, bool)])
            wanted = expected(x, [np.ones(n, bool)])
            for name in ("near_k3", "near_excess"):
                assert state.sum(name)[0] == pytest.approx(wanted.sum(name)[0], rel=promises.OTHER, abs=0), name


def test_flush_to_zero_of_the_caller_changes_nothing(isa: str, rng: np.random.Generator, oracle: Any) -> None:
    x = data("1e-41", 3000, rng)
    x[::3] = 3e-40
    wanted = expected(x, [np.ones(x.size, bool)])
    if not torch.set_flush_denormal(True):
        pytest.skip("this machine cannot flush subnormals")
    try:
        state = run(x, np.zeros_like(x), isa=isa)
        still_set = float(torch.tensor([1e-310], dtype=torch.float64).mul(1.0)) == 0.0
    finally:
        torch.set_flush_denormal(False)
    assert still_set
    oracle.check(state, wanted, wanted, parts=promises.OTHER)


def test_concurrent_calls(rng: np.random.Generator) -> None:
    x = data("laplace", 600_000, rng)
    masks = memberships("4", x.size, rng)
    wanted = run(x, np.zeros_like(x), masks)
    results: list[State] = []

    def work() -> None:
        for threads in (1, 4):
            results.append(run(x, np.zeros_like(x), masks, threads=threads))

    workers = [threading.Thread(target=work) for _ in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(results) == 12
    assert all(np.array_equal(result.buffer, wanted.buffer) for result in results)


def _child(x: np.ndarray, wanted: np.ndarray, pipe: Any) -> None:
    states = [run(x, np.zeros_like(x), threads=threads) for threads in (1, 4, 4)]
    pipe.send(all(np.array_equal(state.buffer, wanted) for state in states))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_fork_after_use(rng: np.random.Generator) -> None:
    x = data("laplace", 600_000, rng)
    wanted = run(x, np.zeros_like(x), threads=4).buffer
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(x, wanted, send))
    child.start()
    assert receive.poll(60)
    assert receive.recv()
    child.join(60)
    assert child.exitcode == 0
    assert np.array_equal(run(x, np.zeros_like(x), threads=4).buffer, wanted)


def test_unknown_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.zeros(10, np.float32)
    with pytest.raises(ValueError, match=r'"sse9" is unknown or not usable on this machine; usable: .*portable'):
        run(x, x, isa="sse9")
    monkeypatch.setenv("PYRLSTATS_ISA", "altivec")
    with pytest.raises(ValueError, match="altivec"):
        run(x, x)


def test_build_config() -> None:
    config = _core.build_config()
    assert config["usable"][-1] == "portable"
    assert set(config["usable"]) <= set(config["instruction_sets"])
    assert config["compiler"]
    assert "-ffast-math" not in config["flags"]


def test_memory_does_not_grow_with_tokens() -> None:
    code = """
import resource, sys, numpy as np
from pyrlstats.backends import cpp
from pyrlstats.backends.batch import Batch
from pyrlstats.layout import Layout
from pyrlstats.state import State
n = 1 << 26
x = np.broadcast_to(np.linspace(-1, 1, 8192, dtype=np.float32), (n // 8192, 8192))
mask = np.broadcast_to(np.array(True), x.shape)
def peak(rows):
    state = State.empty(["a", "b"], Layout(), (0.2, 0.2))
    cpp.accumulate(Batch(x[:rows], x[:rows], (mask[:rows], mask[:rows]), None, None), state, 2)
    assert state.count("n_tokens")[0] == rows * 8192
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
small = peak(64)
print(peak(n // 8192) - small)
"""
    grown = int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
    assert grown < 8192  # KiB on Linux, bytes on macOS


def _kernel_sources(build: Path, names: Sequence[str]) -> list[str]:
    header = subprocess.run(
        [sys.executable, "-I", str(ROOT / "pyrlstats" / "layout.py")], check=True, capture_output=True, text=True
    ).stdout
    (build / "layout.h").write_text(header)
    for name in names:
        (build / f"kernel_{name}.cc").write_text(f'#define ISA {name}\n#include "kernel.inl"\n')
    return [f"-I{ROOT / 'csrc'}", f"-I{build}", "-std=gnu++17", "-O3", "-ffp-contract=off", "-fno-math-errno"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None or shutil.which("nm") is None, reason="needs g++ and nm")
def test_kernel_objects_have_no_weak_symbols(tmp_path: Path) -> None:
    """A weak function compiled for AVX-512 could be picked by the linker for everyone."""
    instruction_sets = _core.build_config()["instruction_sets"]
    flags = _kernel_sources(tmp_path, list(instruction_sets))
    for name, extra in instruction_sets.items():
        source, target = tmp_path / f"kernel_{name}.cc", tmp_path / f"{name}.o"
        subprocess.run(["g++", *flags, *extra.split(), "-c", str(source), "-o", str(target)], check=True)
        symbols = subprocess.run(["nm", "-C", str(target)], check=True, capture_output=True, text=True).stdout
        assert " W " not in symbols
        assert " V " not in symbols


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("aarch64-linux-gnu-g++") is None or shutil.which("qemu-aarch64") is None,
    reason="needs g++-aarch64-linux-gnu and qemu-user",
)
def test_arm64_under_an_emulator(tmp_path: Path, rng: np.random.Generator, oracle: Any) -> None:
    names = ("neon", "portable")
    flags = _kernel_sources(tmp_path, names)
    defines = ["-DHAVE_ISA_NEON", '-DFLAGS_NEON=""', '-DFLAGS_PORTABLE=""', "-static", "-pthread"]
    sources = [str(ROOT / "csrc" / f"{name}.cc") for name in ("driver", "dispatch", "engine", "pool", "workspaces")]
    sources += [str(tmp_path / f"kernel_{name}.cc") for name in names]
    driver = str(tmp_path / "driver")
    subprocess.run(["aarch64-linux-gnu-g++", *flags, *defines, *sources, "-o", driver], check=True)

    def call(name: str, threads: int, logp: Any, old: Any, members: Any, slices: int, by_id: bool) -> State:
        state = State.empty([f"s{i}" for i in range(slices)], Layout(), CLIP)
        codes = [_core.DTYPES[str(array.dtype).removeprefix("torch.")] for array in (logp, old, members)]
        head = [logp.size, slices, state.buffer.size, by_id, *codes, 5, -24, 8]
        words = [np.array(head, np.int64), np.array(clip_thresholds(CLIP)), logp, old, members, state.buffer]
        done = subprocess.run(
            ["qemu-aarch64", driver, name, str(threads)],
            input=b"".join(part.tobytes() for part in words),
            check=True,
            capture_output=True,
        )
        state.buffer[...] = np.frombuffer(done.stdout, np.int64)
        return state

    for name in names:
        for kind in ("special", "mixed", "far and near", "growing", "laplace", "half zero", "50"):
            x = data(kind, 5003, rng)
            masks = memberships(str(rng.choice(["random", "4", "32"])), x.size, rng)
            check(oracle, call(name, 1, x, np.zeros_like(x), np.array(masks), len(masks), False), x, masks)
        ids = np.repeat(rng.integers(-1, 9, 200), 50)[:5003].astype(np.int64)
        x = data("mixed", 5003, rng)
        state = call(name, 1, x, np.zeros_like(x), ids, 8, True)
        check(oracle, state, x, [ids == s for s in range(8)], int(np.sum(ids == 8)))
        half = data("laplace", 5003, rng).astype(np.float16)
        state = call(name, 1, half, half[::-1].copy(), ids, 8, True)
        check(oracle, state, reference.log_ratio(half, half[::-1]), [ids == s for s in range(8)], int(np.sum(ids == 8)))
        x = data("laplace", 400_000, rng)
        masks = memberships("4", x.size, rng)
        states = [call(name, t, x, np.zeros_like(x), np.array(masks), 4, False) for t in (1, 3)]
        assert np.array_equal(states[0].buffer, states[1].buffer)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(), (1,), (5000,), (70, 64)], ids=str)
def test_arrays_need_not_be_aligned(isa: str, dtype: str, shape: tuple[int, ...]) -> None:
    """As fields of packed records are not: such loads are undefined in C++, so they are staged."""
    rng = np.random.default_rng(5)
    x = rng.normal(0, 0.3, shape).astype(dtype)
    record = np.zeros(shape, np.dtype([("pad", np.uint8), ("x", dtype), ("old", dtype), ("id", np.int32)]))
    record["x"], record["id"] = x, rng.integers(0, 2, shape)
    packed = np.zeros(x.nbytes + 1, np.uint8)[1:].view(dtype).reshape(shape)
    packed[...] = x
    assert not packed.flags.aligned
    zeros = np.zeros_like(x)
    wanted = run(x, zeros, slice_ids=np.array(record["id"]), slices=2, isa=isa)
    for logp, old_logp, ids in ((record["x"], record["old"], record["id"]), (packed, zeros, record["id"])):
        assert np.array_equal(run(logp, old_logp, slice_ids=ids, slices=2, isa=isa).buffer, wanted.buffer)
