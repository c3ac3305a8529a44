"""The Triton kernels against the reference, on a GPU or, with TRITON_INTERPRET=1, in the interpreter on the CPU."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pyrlstats import reference
from pyrlstats._inputs import gate, resolve_names
from pyrlstats.backends import digits
from pyrlstats.distributed import _Packed
from pyrlstats.groups import sequences
from pyrlstats.groups.accumulate import accumulate
from pyrlstats.groups.inputs import with_groups
from pyrlstats.groups.options import Options, groups_of
from pyrlstats.layout import INF_BITS, TABLES, Layout, clip_thresholds
from pyrlstats.slice_stats import SliceStats
from pyrlstats.state import State

triton_gpu = pytest.importorskip("pyrlstats.backends.triton_gpu")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
EMULATED = os.environ.get("PYRLSTATS_EMULATED_PTX") == "1"  # the CUDA ways in the interpreter
DEVICE = "cpu" if INTERPRETED else "cuda"
SIZE = 3_000 if INTERPRETED else 300_000
CLIP = (0.2, 0.2)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="no CUDA or ROCm device"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy, in the interpreter, of the NaN we put there
]


@pytest.fixture(autouse=True)
def _inline_ptx(monkeypatch):
    if EMULATED:
        import emulated_ptx  # of tests/

        emulated_ptx.install(monkeypatch)


@pytest.fixture(params=["small", "large"])
def size(request, monkeypatch):
    """The launch of few tokens, and that of many, which counts in a row for every set of slices."""
    if request.param == "large":
        if INTERPRETED and not EMULATED:
            pytest.skip("one launch for all sizes")
        choose = triton_gpu.launch.slice_hist.config
        many = 1 << 28
        monkeypatch.setattr(triton_gpu.launch.slice_hist, "config", lambda n, *others: choose(many, *others))
    return request.param


FLOATS = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
MASK_DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *FLOATS.values()]


def fill(
    state: State | None, logp, old_logp, masks=None, *, names=None, mask=None, slice_ids=None, layout=None, clip=CLIP
):
    """A state on DEVICE of these CPU tensors; views stay views."""
    names = resolve_names(masks, slice_ids, names)
    batch = gate(*(_to_device(item) for item in (logp, old_logp, masks, slice_ids, mask)), names)
    if state is None:
        state = State.empty(names, layout or Layout(), clip, torch.device(DEVICE))
    triton_gpu.accumulate(batch, state)
    return state


def _to_device(item: Any) -> Any:
    if isinstance(item, dict):
        return {name: _to_device(tensor) for name, tensor in item.items()}
    if isinstance(item, torch.Tensor) and not INTERPRETED:
        storage = torch.empty(0, dtype=item.dtype).set_(item.untyped_storage()).to(DEVICE)
        return storage.as_strided(item.shape, item.stride(), item.storage_offset())
    return item


def check(oracle, state: State, logp, old_logp, masks=None, **options) -> None:
    wanted = oracle.state(logp, old_logp, masks, **options)
    x = torch.from_numpy(np.asarray(np.abs(reference.log_ratio(_numpy(logp), _numpy(old_logp)))))
    magnitudes = oracle.state(x, torch.zeros_like(x), masks, **options)
    oracle.check(state.to_host(), wanted, magnitudes, "triton differs from the reference")


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def log_ratios(rng, shape, kind="wild"):
    if kind == "near":
        return np.asarray(rng.standard_normal(shape) * 0.01)
    if kind == "laplace":
        return np.asarray(rng.laplace(size=shape))
    x = np.asarray(rng.standard_normal(shape) * 10.0 ** rng.uniform(-8.0, 1.7, shape))
    mark = np.asarray(rng.random(shape))
    x[mark < 0.1] = 0.0
    for index, value in enumerate((np.nan, np.inf, -np.inf, -0.0, 1e-40, 3e38)):
        x[(mark > 0.99 - 0.002 * index) & (mark < 0.99 - 0.002 * index + 0.001)] = value
    return x


def tokens(rng, shape, dtypes=("float32", "float32"), kind="wild"):
    new, old = (FLOATS[name] for name in dtypes)
    old_logp = -rng.gamma(0.7, 2.0, shape)
    logp = old_logp + log_ratios(rng, shape, kind)
    return torch.from_numpy(np.asarray(logp)).to(new), torch.from_numpy(np.asarray(old_logp)).to(old)


def run_masks(rng, n, shares, run=128):
    """Masks in runs, as trainers have them."""
    runs = -(-n // run)
    return {
        f"s{s}": torch.from_numpy(np.repeat(rng.random(runs) < share, run)[:n].copy()) for s, share in enumerate(shares)
    }


@pytest.mark.parametrize("kind", ["wild", "near", "laplace"])
@pytest.mark.parametrize("slices", [1, 2, 3, 4, 7])
def test_overlapping_masks(oracle, rng, slices, kind):
    logp, old_logp = tokens(rng, (SIZE + 37,), kind=kind)
    masks = run_masks(rng, SIZE + 37, [0.7, 0.5, 0.2, 0.05, 0.0, 1.0, 0.4][:slices])
    check(oracle, fill(None, logp, old_logp, masks), logp, old_logp, masks)


@pytest.mark.parametrize("names", list(itertools.product(FLOATS, FLOATS)), ids="-".join)
def test_dtypes(oracle, rng, names):
    logp, old_logp = tokens(rng, (SIZE // 3,), names)
    mask = torch.from_numpy(rng.random(SIZE // 3) < 0.6)
    check(oracle, fill(None, logp, old_logp, mask), logp, old_logp, mask)


@pytest.mark.parametrize("dtype", MASK_DTYPES, ids=str)
def test_mask_dtypes(oracle, rng, dtype):
    logp, old_logp = tokens(rng, (SIZE // 2,))
    values = torch.from_numpy(rng.integers(-1, 3, SIZE // 2)).to(dtype)
    if dtype.is_floating_point:
        values[::7] = float("nan")
    masks = {"a": values, "b": values.flip(0), "c": torch.from_numpy(rng.random(SIZE // 2) < 0.5)}
    check(oracle, fill(None, logp, old_logp, masks), logp, old_logp, masks)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("slices", [1, 3, 8, 11])
def test_slice_ids(oracle, rng, slices, dtype):
    logp, old_logp = tokens(rng, (SIZE,))
    low = 0 if dtype == torch.uint8 else -2
    ids = torch.from_numpy(rng.integers(low, slices + 2, SIZE)).to(dtype)
    base = torch.from_numpy(rng.random(SIZE) < 0.7)
    options = {"slice_ids": ids, "names": [f"s{s}" for s in range(slices)], "mask": base}
    check(oracle, fill(None, logp, old_logp, **options), logp, old_logp, **options)


def test_no_mask_and_base_mask(oracle, rng):
    logp, old_logp = tokens(rng, (SIZE,))
    base = torch.from_numpy(rng.integers(0, 2, SIZE))
    check(oracle, fill(None, logp, old_logp), logp, old_logp)
    check(oracle, fill(None, logp, old_logp, mask=base), logp, old_logp, mask=base)


VIEWS = {
    "[B, T]": ((17, 121), lambda a: a),
    "0-d": ((), lambda a: a),
    "3-d permuted": ((3, 17, 41), lambda a: a.permute(2, 0, 1)),
    "transposed": ((121, 17), lambda a: a.T),
    "[:, 1:]": ((17, 122), lambda a: a[:, 1:]),
    "[1:, 3:70]": ((17, 122), lambda a: a[1:, 3:70]),
    "offset by one": ((2050,), lambda a: a[1:]),
    "step 3 both ways": ((31, 100), lambda a: a[::3, 1::3]),
    "column": ((1001, 3), lambda a: a[:, 1]),
    "expanded row": ((1, 121), lambda a: a.expand(17, 121)),
    "4-d": ((2, 3, 5, 7), lambda a: a[:, 1:, 1:, ::2]),
    "no tokens": ((0,), lambda a: a),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views(oracle, rng, view):
    shape, look = VIEWS[view]
    logp, old_logp = (look(tensor) for tensor in tokens(rng, shape))
    masks = {"half": torch.from_numpy(np.asarray(rng.random(shape) < 0.5)), "all": torch.ones(shape)}
    masks = {name: look(mask) for name, mask in masks.items()}
    base = torch.from_numpy(np.asarray(rng.random(tuple(logp.shape)) < 0.8))
    check(oracle, fill(None, logp, old_logp.contiguous(), masks, mask=base), logp, old_logp, masks, mask=base)


@pytest.mark.parametrize("look", [lambda a: a, lambda a: a.T], ids=["in order", "transposed"])
def test_what_whole_tiles_leave(oracle, rng, monkeypatch, look):
    """A launch of their own, of tokens in the order of memory."""
    monkeypatch.setattr(triton_gpu.launch, "WHOLE", 2048)
    logp, old_logp = (look(tensor) for tensor in tokens(rng, (97, 53)))
    masks = {name: look(torch.from_numpy(rng.random((97, 53)) < 0.5)) for name in "abc"}
    check(oracle, fill(None, logp, old_logp, masks), logp, old_logp, masks)


def test_broadcast_masks(oracle, rng):
    logp, old_logp = tokens(rng, (12, 90))
    shapes = {"full": (12, 90), "[B, 1]": (12, 1), "[T]": (90,), "0-d": ()}
    masks = {name: torch.from_numpy(np.asarray(rng.random(shape) < 0.6)) for name, shape in shapes.items()}
    check(oracle, fill(None, logp, old_logp, masks), logp, old_logp, masks)


@pytest.mark.parametrize("layout", [Layout(), Layout(3, -16, 16), Layout(7), Layout(9), Layout(0, 0, 128)], ids=str)
def test_layouts(oracle, rng, layout):
    logp, old_logp = tokens(rng, (SIZE // 4,))
    masks = run_masks(rng, SIZE // 4, [0.5, 0.8, 0.3])
    state = fill(None, logp, old_logp, masks, layout=layout)
    check(oracle, state, logp, old_logp, masks, layout=layout)


@pytest.mark.parametrize(
    "values",
    [
        [5000.0, 1.0, -3.0],
        [-300.0, -300.5],
        [-700.0, -1e30, -5000.0],
        [3e38, 2.9e38, -3e38, 1e-3],
        [0.0, -0.0],
        [0.5, -0.5, np.nextafter(np.float32(0.5), np.float32(0))],
        [-1e-5, -2e-5],
        [np.nan, np.inf, -np.inf],
        [1e-45, -1e-40, 1e-30],
        [700.0, 710.0, 320.0, -320.0],
        [0.3],
    ],
    ids=str,
)
def test_adversarial_values(oracle, rng, values):
    x = torch.from_numpy(rng.choice(np.asarray(values, np.float32), 5000))
    masks = {"one": torch.from_numpy(rng.random(5000) < 0.5), "two": torch.ones(5000, dtype=torch.bool)}
    masks["empty"] = torch.zeros(5000, dtype=torch.bool)
    zero = torch.zeros_like(x)
    check(oracle, fill(None, x, zero, masks), x, zero, masks)


def skip_one_launch(size, slices):
    if size == "large" and slices <= 2:
        pytest.skip("one launch for all sizes")


def around(*values):
    """The float32 values, their neighbours, and all of them with the other sign."""
    exact = np.asarray(values, np.float32)
    near = np.concatenate([np.nextafter(exact, np.float32(way)) for way in (-np.inf, np.inf)] + [exact])
    return np.concatenate([near, -near])


def clip_at(low, high):
    """The ratio clip whose thresholds are -low and high."""
    clip = -np.expm1(-low), np.expm1(high)
    assert clip_thresholds(clip) == (-np.float32(low), np.float32(high))
    return float(clip[0]), float(clip[1])


CLIPS = {
    "usual": CLIP,
    "on edges of bins": clip_at(0.25, 0.1875),
    "at the near limit": clip_at(0.5, 0.5),
    "one near, one far": (0.2, 3.0),
    "far": (0.9, 100.0),
    "beyond the last bin": (1.0 - 2.0**-53, 1e200),
    "all but zero": (1e-300, 1e-300),
    "subnormal": (1e-40, 1e-42),
}


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("slices", [1, 4])
def test_clip_counts(oracle, rng, size, slices, clip):
    skip_one_launch(size, slices)
    thresholds = clip_thresholds(CLIPS[clip])
    special = around(*thresholds, 0.5, 0.0, 1e-40, 255.0, 256.0, 320.0, 1e5)
    n = 2_300
    x = np.where(rng.random(n) < 0.3, rng.choice(special, n), rng.standard_normal(n) * 0.01).astype(np.float32)
    x[rng.random(n) < 0.01] = np.inf
    x[rng.random(n) < 0.01] = -np.inf
    x[rng.random(n) < 0.01] = np.nan
    x = torch.from_numpy(x)
    masks, zero, options = run_masks(rng, n, [1.0, 0.5, 0.3, 0.1][:slices]), torch.zeros(n), {"clip": CLIPS[clip]}
    check(oracle, fill(None, x, zero, masks, **options), x, zero, masks, **options)


FAR = {
    "one value": [0.5],
    "where k3 is least known": [0.5198603],
    "limits": around(0.5, 320.0),
    "huge": [330.0, -400.0, 5000.0],
    "weights that vanish": [-690.0, -1000.0, np.nan, 0.0],
    "nothing but weights that vanish": [-1000.0, np.nan],
    "of all kinds": [0.0, 0.01, 0.3, -1.0, 20.0, 321.0, -1e30, np.inf, -np.inf, np.nan],
}


@pytest.mark.parametrize("values", FAR)
@pytest.mark.parametrize("how", ["one slice", "masks in runs", "random masks", "ids"])
def test_far_tokens(oracle, rng, size, how, values):
    skip_one_launch(size, 1 if how == "one slice" else 4)
    n = 2_300
    x = torch.from_numpy(rng.choice(np.asarray(FAR[values], np.float32), n))
    masks: Any = {"all": torch.ones(n)}
    options: Any = {}
    if how == "masks in runs":
        masks = run_masks(rng, n, [0.7, 0.5, 0.2, 0.05])
    elif how == "random masks":
        masks = {f"s{s}": torch.from_numpy(rng.random(n) < 0.5) for s in range(4)}
    elif how == "ids":
        ids = torch.from_numpy(rng.integers(-1, 8, n).astype(np.int8))
        masks, options = None, {"slice_ids": ids, "names": [f"s{s}" for s in range(8)]}
    zero = torch.zeros(n)
    check(oracle, fill(None, x, zero, masks, **options), x, zero, masks, **options)


@pytest.mark.parametrize("how", ["one slice", "masks", "ids"])
@pytest.mark.parametrize("count", [1, 2, 8, 9])
def test_few_huge_tokens(oracle, rng, size, how, count):
    """Up to second_look.FEW of a tile are added one at a time, in whatever order their scales come."""
    skip_one_launch(size, 1 if how == "one slice" else 4)
    n = 4_400
    x = (rng.standard_normal(n) * 0.01).astype(np.float32)
    for place in (0, 512, 2_300):
        where = place + rng.choice(512, count, replace=False)
        x[where] = rng.choice([321.0, -350.0, 700.5, -2e4, 3e38, 1e3, -1e30], count)
    x, zero = torch.from_numpy(x), torch.zeros(n)
    masks: Any = {"all": torch.ones(n)}
    options: Any = {}
    if how == "masks":
        masks = {f"s{s}": torch.from_numpy(rng.random(n) < 0.5) for s in range(4)}
    elif how == "ids":
        ids = torch.from_numpy(rng.integers(-1, 8, n).astype(np.int8))
        masks, options = None, {"slice_ids": ids, "names": [f"s{s}" for s in range(8)]}
    check(oracle, fill(None, x, zero, masks, **options), x, zero, masks, **options)


@pytest.mark.parametrize("share", [1e-3, 0.03])
def test_few_far_tokens(oracle, rng, size, share):
    """A warp looks closer for one token, and its extremum may be in any row of the tile."""
    n = 4_400
    x = np.where(rng.random(n) < share, rng.laplace(size=n), rng.standard_normal(n) * 0.01).astype(np.float32)
    x = torch.from_numpy(x)
    zero = torch.zeros(n)
    for masks in (None, run_masks(rng, n, [0.9, 0.4])):
        check(oracle, fill(None, x, zero, masks), x, zero, masks)


@pytest.mark.parametrize("how", ["no mask", "float64", "unaligned", "transposed"])
def test_extrema_of_every_row(oracle, rng, how):
    """One extremum among equal tokens, wherever it lies in a tile."""
    for at in rng.integers(0, 2048, 6):
        x = torch.full((2049,), 0.01, dtype=torch.float64 if how == "float64" else torch.float32)
        x[at], x[(at + 777) % 2048] = 0.02, -0.03
        x = x[1:] if how == "unaligned" else x[:2048]
        x = x.reshape(32, 64).T if how == "transposed" else x
        zero = torch.zeros_like(x)
        check(oracle, fill(None, x, zero), x, zero)


def test_a_masked_out_value_never_takes_part(oracle, rng):
    logp, old_logp = tokens(rng, (SIZE,), kind="near")
    mask = torch.from_numpy(rng.random(SIZE) < 0.5)
    clean = fill(None, logp, old_logp, {"a": mask, "b": mask}).to_host()
    for value in (np.nan, np.inf, 3e38, -1e4):
        dirty = fill(None, logp.masked_fill(~mask, value), old_logp, {"a": mask, "b": mask}).to_host()
        assert np.array_equal(clean.buffer, dirty.buffer)


def test_adds_to_the_state(oracle, rng):
    """Batches of very different scale: the far weights are rescaled at each."""
    parts, state = [], None
    for scale in (0.01, 3.0, 2000.0, 0.1):
        x = torch.from_numpy((rng.standard_normal(2000) * scale).astype(np.float32))
        masks = {"a": torch.from_numpy(rng.random(2000) < 0.5), "b": torch.from_numpy(rng.random(2000) < 0.1)}
        state = fill(state, x, torch.zeros_like(x), masks)
        parts.append((x, masks))
    x = torch.cat([part for part, _ in parts])
    masks = {name: torch.cat([part[name] for _, part in parts]) for name in ("a", "b")}
    check(oracle, state, x, torch.zeros_like(x), masks)


def test_optional_statistics(oracle, rng):
    """Histograms and sums of sequences are made by the kernels, the rest by array operations, on the tokens' device."""
    logp = torch.from_numpy(-rng.random((5, SIZE // 50)).astype(np.float32))
    old_logp = logp - torch.from_numpy(rng.normal(0.0, 0.3, logp.shape).astype(np.float32))
    masks = {"some": torch.from_numpy(rng.random(logp.shape) < 0.4), "all": torch.ones(1, 1)}
    advantages = torch.from_numpy(rng.normal(size=5).astype(np.float32))
    options = Options(sequences=True, advantages=True, truncate=(0.5, 2.0), entropy=True, probabilities=True)
    groups = groups_of(options, CLIP)
    batch = gate(*(_to_device(item) for item in (logp, old_logp, masks, None, None)), tuple(masks))
    batch = with_groups(batch, groups, _to_device(advantages), None)
    state = State.empty(tuple(masks), Layout(), CLIP, torch.device(DEVICE), groups)
    for _ in range(2):
        accumulate(batch, state, triton_gpu.accumulate, sequence_sums=triton_gpu.sequence_sums)
    asked = {name: value for name, value in options._asdict().items() if name not in ("advantages", "dual_clip")}
    wanted = oracle.state(logp, old_logp, masks, advantages=advantages, **asked)
    twice = SliceStats(wanted) + SliceStats(wanted)
    assert SliceStats(state).to_dict() == pytest.approx(twice.to_dict(), rel=1e-5, abs=1e-7)
    for mine, theirs in zip(state.to_host().sections(), twice.state.to_host().sections(), strict=True):
        assert np.array_equal(mine.counts[:, :1], theirs.counts[:, :1])
        if not torch.equal(torch.as_tensor(mine.histogram), torch.as_tensor(theirs.histogram)):
            assert mine.histogram.sum() == theirs.histogram.sum()  # a sum of a sequence at the edge of a bin


def sequence_ends(rng, n=None):
    """Boundaries of sequences of all lengths, and the number of tokens: some before the first, some after the last."""
    lengths = [0, 1, 0, 0, 37, 1, 1, 150, 2, 64, 0, 63, 65, 0]
    if n is not None:
        ends = np.sort(rng.integers(0, n + 1, 1 if n == 0 else 9))
    else:
        if not INTERPRETED:
            lengths += [*rng.integers(0, 6, 200), *rng.integers(0, 9_000, 30), 100_000]
        ends = np.concatenate(([3], 3 + np.cumsum(lengths)))
    return torch.from_numpy(ends), int(ends[-1]) + 9


def check_sums(logp, old_logp, ends, masks=None, *, slice_ids=None, names=None, mask=None):
    """The kernel's sums beside those of the definition and of the array operations; returns them."""
    names = resolve_names(masks, slice_ids, names)
    given = (logp, old_logp, masks, slice_ids, mask)
    host = replace(gate(*given, names), boundaries=ends)
    batch = replace(gate(*(_to_device(item) for item in given), names), boundaries=_to_device(ends))
    got = triton_gpu.sequence_sums(batch, len(names)).cpu().numpy()
    assert got.shape == (4, len(names), len(ends) - 1)
    flat_logp, flat_old = (_numpy(item.reshape(-1)).astype(np.float64) for item in (host.logp, host.old_logp))
    x = reference.log_ratio(_numpy(host.logp), _numpy(host.old_logp)).reshape(-1).astype(np.float64)
    base = np.ones(x.shape, bool) if mask is None else _numpy(host.base_mask.reshape(-1)) != 0
    wanted, scale = np.zeros(got.shape), np.zeros(got.shape)
    places = ends.clamp(0, x.size).tolist()
    for s in range(len(names)):
        member = base
        if slice_ids is not None:
            member = base & (host.slice_ids.reshape(-1).to(torch.int64).numpy() == s)
        elif masks is not None:
            member = base & (_numpy(host.masks[s].reshape(-1)) != 0)
        for i, (begin, end) in enumerate(itertools.pairwise(places)):
            inside = np.flatnonzero(member[begin:end]) + begin
            for row, values in enumerate((np.ones_like(x), x, flat_logp, flat_old)):
                wanted[row, s, i] = values[inside].sum()
                scale[row, s, i] = np.abs(values[inside]).sum()
    arrays = sequences.sums(replace(host, boundaries=ends.clamp(0, x.size)), len(names)).numpy()
    for other in (wanted, arrays):
        finite = np.isfinite(other)
        assert np.array_equal(got[0], other[0])
        assert np.array_equal(got[~finite], other[~finite], equal_nan=True)
        assert (np.abs(got[finite] - other[finite]) <= 1e-12 * scale[finite]).all()
    return got


def usual_masks(rng, n, slices):
    return {f"s{s}": torch.from_numpy(rng.random(n) < (0.6, 1.0, 0.0, 0.1)[s % 4]) for s in range(slices)}


@pytest.mark.parametrize("lanes", [4, 32, 128])
@pytest.mark.parametrize("parts", [1, 3])
def test_sums_of_sequences(rng, monkeypatch, lanes, parts):
    """Empty sequences, of one token, of many; each in parts; NaN and infinities."""
    monkeypatch.setattr(triton_gpu.sequences, "shape", lambda *_: (lanes, parts))
    ends, n = sequence_ends(rng)
    logp, old_logp = tokens(rng, (n,))
    for at, value in ((5, np.nan), (48, np.inf), (200, -np.inf)):
        logp[at] = value
    masks = usual_masks(rng, n, 3)
    got = check_sums(logp, old_logp, ends, masks)
    assert not np.isfinite(got[1:, 1]).all()
    assert got[0, 1].sum() == ends[-1] - ends[0]
    assert np.array_equal(got, check_sums(logp, old_logp, ends, masks), equal_nan=True)


@pytest.mark.parametrize("slices", [1, 5, 32])
@pytest.mark.parametrize("how", ["masks", "ids"])
def test_sums_of_sequences_in_many_slices(rng, slices, how):
    ends, n = sequence_ends(rng, 90 if INTERPRETED else None)
    logp, old_logp = tokens(rng, (n,), ("bfloat16", "float32"))
    base = torch.from_numpy(rng.random(n) < 0.7)
    if how == "masks":
        check_sums(logp, old_logp, ends, usual_masks(rng, n, slices), mask=base)
    else:
        ids = torch.from_numpy(rng.integers(-2, slices + 2, n))
        check_sums(logp, old_logp, ends, slice_ids=ids, names=[f"s{s}" for s in range(slices)], mask=base)


@pytest.mark.parametrize("index", range(4))
def test_sums_of_sequences_of_all_dtypes(rng, index):
    """Every dtype once as logp, as old_logp, as mask, as ids: -1 is the largest of the unsigned."""
    ends, _ = sequence_ends(rng, 200)
    new, old = list(FLOATS)[index], list(FLOATS)[index - 1]
    logp, old_logp = tokens(rng, (200,), (new, old))
    mask_dtypes = MASK_DTYPES[index::4]
    masks = {str(dtype): torch.from_numpy(rng.random(200) < 0.5).to(dtype) for dtype in mask_dtypes}
    if index == 3:
        masks["tiny"] = torch.where(torch.arange(200) % 3 == 0, 1e-300, -0.0).to(torch.float64)
        masks["NaN"] = torch.where(torch.arange(200) % 3 == 0, np.nan, 0.0).to(torch.bfloat16)
    check_sums(logp, old_logp, ends, masks, mask=torch.from_numpy(rng.random(200) < 0.8).to(MASK_DTYPES[index]))
    ids = torch.from_numpy(rng.integers(-1, 3, 200))
    for name in (f"int{8 << index}", f"uint{8 << index}"):
        check_sums(logp, old_logp, ends, slice_ids=ids.to(getattr(torch, name)), names=["a", "b"])


@pytest.mark.parametrize("view", VIEWS)
def test_sums_of_sequences_of_views(rng, view):
    """In the order of the flattened tokens, whatever the strides."""
    shape, look = VIEWS[view]
    logp, old_logp = (look(tensor) for tensor in tokens(rng, shape, kind="near"))
    masks = {"full": look(torch.from_numpy(np.asarray(rng.random(shape) < 0.5))), "0-d": torch.ones(())}
    if logp.ndim > 1:
        masks["[B, 1]"] = torch.from_numpy(rng.random((*logp.shape[:-1], 1)) < 0.5)
        masks["[T]"] = torch.from_numpy(rng.random(logp.shape[-1]) < 0.5)
    ends, _ = sequence_ends(rng, logp.numel())
    check_sums(logp, old_logp.contiguous(), ends, masks)


def test_sums_of_one_sequence_and_of_none(rng):
    n = 20_000 if INTERPRETED else 1_000_000
    logp, old_logp = tokens(rng, (n,), kind="near")
    assert triton_gpu.sequences.shape(n, 1, torch.device(DEVICE)).parts > 1
    check_sums(logp, old_logp, torch.tensor([0, n]))
    check_sums(logp[:40], old_logp[:40], torch.tensor([7]))
    check_sums(logp[:40], old_logp[:40], torch.tensor([11] * 7))
    check_sums(logp[:40], old_logp[:40], torch.tensor([-5, 2, 2, 39, 90]))  # cut to the tokens


def test_a_masked_out_value_is_in_no_sum_of_a_sequence(rng):
    ends, n = sequence_ends(rng)
    logp, old_logp = tokens(rng, (n,), kind="near")
    mask = torch.from_numpy(rng.random(n) < 0.5)
    clean = check_sums(logp, old_logp, ends, {"a": mask})
    for value in (np.nan, -np.inf):
        dirty = check_sums(logp.masked_fill(~mask, value), old_logp, ends, {"a": mask})
        assert np.array_equal(clean, dirty)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("slices", [1, 3, 17])
def test_packing_for_a_reduction(table, slices):
    """To the bit what the array operations of distributed.py make, scales far apart and empty slices included."""
    rng = np.random.default_rng(slices)
    names = tuple(f"s{i}" for i in range(slices))
    state = State(names, Layout(5, -2, 2), CLIP, np.empty(0), (), table)
    rows = state.rows
    n_integers = slices * (len(rows.counts) + (Layout(5, -2, 2).n_bins if rows.binned else 0))
    exponents = rng.integers(-900, 900, (2, slices, len(rows.sums)))
    sums = np.ldexp(rng.uniform(-1.0, 1.0, exponents[0].shape), exponents[0])
    maxima = np.where(rng.random((2, slices, len(rows.maxima))) < 0.3, -np.inf, rng.normal(0.0, 300.0))
    own, common = maxima[0], np.maximum(*maxima)
    integers = rng.integers(0, 2**53, n_integers)
    words = np.concatenate([integers, sums.ravel().view(np.int64), own.ravel().view(np.int64)])

    array, device = torch.from_numpy(words.copy()), torch.device(DEVICE)
    section = State(names, Layout(5, -2, 2), CLIP, array, (), table)
    greatest = torch.from_numpy(np.stack([own, common]))
    wanted = torch.full((n_integers + sums.size,), -7.0, dtype=torch.float64)
    _Packed(section, wanted, greatest.view(2, -1), None).pack()
    got = torch.full_like(wanted, -7.0).to(device)
    words, own, common = array.to(device), greatest[0].to(device), greatest[1].to(device)
    launches = triton_gpu.pack.Section(words, own, common, got, n_integers, rows)
    for _ in range(3):
        launches.pack()
    assert torch.equal(got.cpu().view(torch.int64), wanted.view(torch.int64))

    _Packed(section, wanted, greatest.view(2, -1), None).unpack()
    for _ in range(3):
        launches.unpack()
    assert torch.equal(words.cpu(), array)


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("how", ["masks", "ids", "all"])
def test_digits_of_a_radix_selection(absolute, how):
    """Every count, next to a NumPy histogram: ties that fill tiles, intervals of no key, of one, of all."""
    rng = np.random.default_rng(7)
    x = rng.standard_t(2, SIZE).astype(np.float32)
    x[rng.random(SIZE) < 0.4] = 0.3
    x[: SIZE // 3] = np.repeat(np.float32([0.3, -0.0, np.inf, np.nan]), SIZE // 12 + 1)[: SIZE // 3]
    ids, base = rng.integers(-1, 3, SIZE), rng.random(SIZE) < 0.9
    tensors = [torch.from_numpy(item) for item in (x, np.zeros_like(x), base)]
    members = [base & (ids == s) for s in range(2)] if how != "all" else [base]
    if how == "masks":
        chosen = {"masks": {f"s{s}": torch.from_numpy(ids == s) for s in range(2)}, "slice_ids": None}
    else:
        chosen = {"masks": None, "slice_ids": torch.from_numpy(ids) if how == "ids" else None}
    names = tuple(f"s{s}" for s in range(len(members)))
    batch = gate(*map(_to_device, tensors[:2]), *map(_to_device, chosen.values()), _to_device(tensors[2]), names)

    key = digits.key_of(torch.from_numpy(x), absolute).numpy().astype(np.int64)
    tie = int(np.float32(0.3).view(np.int32))
    low = np.array([[tie, tie - 700, -INF_BITS + 1, 0, 5], [tie, 1, 0, -tie, tie]])[: len(members)]
    width = np.array([[1, 1500, 2 * INF_BITS - 1, 1, 0], [2048, INF_BITS - 1, 1, 1 << 18, 0]])[: len(members)]
    shift = np.maximum([[int(one - 1).bit_length() - 11 if one else 0 for one in row] for row in width], 0)
    wanted = np.zeros((*low.shape, digits.DIGITS), np.int64)
    for s, q in np.ndindex(low.shape):
        inside = members[s] & (key >= low[s, q]) & (key < low[s, q] + width[s, q])
        wanted[s, q] = np.bincount((key[inside] - low[s, q]) >> shift[s, q], minlength=digits.DIGITS)
    intervals = digits.Intervals(*(torch.from_numpy(field).to(DEVICE) for field in (low, width, shift)))
    got = triton_gpu.count_digits(batch, intervals, absolute)
    assert np.array_equal(got.cpu().numpy(), wanted)
    assert wanted.sum(-1).max() > SIZE // 12
