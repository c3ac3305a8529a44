"""Every accumulator x backend x dtype x layout in memory x kind of mask, against the reference.

Integers and extrema are equal to the bit; float sums keep the bounds of ``promises.sum_bounds``. A new backend is
tested by adding its name to ``conftest.TESTED``, a new accumulator by its row in ``layout``.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

import pyrlstats
from pyrlstats.layout import Layout

FLOATS = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
DTYPE_PAIRS = [
    *((name, name) for name in FLOATS),
    ("float32", "bfloat16"),
    ("bfloat16", "float32"),
    ("bfloat16", "float16"),
    ("float16", "float32"),
    ("float64", "float32"),
    ("bfloat16", "float64"),
]
MASK_DTYPES = [
    torch.bool,
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *FLOATS.values(),
]
ID_DTYPES = [dtype for dtype in MASK_DTYPES if dtype != torch.bool and not dtype.is_floating_point]


def log_ratios(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """What a run may hold: most tokens nearly on policy, heavy tails, exact zeros, a few that are not finite."""
    x = np.asarray(rng.standard_normal(shape) * 10.0 ** rng.uniform(-8.0, 1.7, shape))
    kind = np.asarray(rng.random(shape))
    x[kind < 0.1] = 0.0
    for index, value in enumerate((np.nan, np.inf, -np.inf, -0.0, 1e-40, 3e38)):
        x[(kind > 0.99 - 0.002 * index) & (kind < 0.99 - 0.002 * index + 0.001)] = value
    return x


def log_probabilities(
    rng: np.random.Generator, shape: tuple[int, ...], dtypes: tuple[str, str]
) -> tuple[torch.Tensor, torch.Tensor]:
    new, old = (FLOATS[name] for name in dtypes)
    old_logp = -rng.gamma(0.7, 2.0, shape)
    logp = old_logp + log_ratios(rng, shape)
    return torch.from_numpy(np.asarray(logp)).to(new), torch.from_numpy(np.asarray(old_logp)).to(old)


def overlapping_masks(rng: np.random.Generator, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Three bool masks: half of the tokens, a tenth of them, none."""
    shares = {"half": 0.5, "few": 0.1, "none": 0.0}
    return {name: torch.from_numpy(np.asarray(rng.random(shape) < share)) for name, share in shares.items()}


# name -> (shape in memory, view of it that is passed)
VIEWS: dict[str, tuple[tuple[int, ...], Any]] = {
    "[N]": ((2049,), lambda a: a),
    "[B, T]": ((17, 121), lambda a: a),
    "[1, N]": ((1, 2049), lambda a: a),
    "[N, 1]": ((515, 1), lambda a: a),
    "0-d": ((), lambda a: a),
    "[B, T, 1]": ((5, 67, 1), lambda a: a),
    "3-d": ((3, 17, 41), lambda a: a),
    "3-d permuted": ((3, 17, 41), lambda a: a.permute(2, 0, 1)),
    "transposed": ((121, 17), lambda a: a.T),
    "[:, 1:]": ((17, 122), lambda a: a[:, 1:]),
    "[:, :-1]": ((17, 122), lambda a: a[:, :-1]),
    "[1:, 3:70]": ((17, 122), lambda a: a[1:, 3:70]),
    "offset by one": ((2050,), lambda a: a[1:]),
    "step 2": ((4097,), lambda a: a[::2]),
    "step 3 both ways": ((31, 100), lambda a: a[::3, 1::3]),
    "column": ((1001, 3), lambda a: a[:, 1]),
    "expanded row": ((1, 121), lambda a: a.expand(17, 121)),
    "expanded column": ((17, 1), lambda a: a.expand(17, 121)),
    "expanded scalar": ((), lambda a: a.expand(700)),
    "no tokens": ((0,), lambda a: a),
    "no rows": ((0, 12), lambda a: a),
    "no columns": ((12, 0), lambda a: a),
}


@pytest.mark.parametrize("dtypes", DTYPE_PAIRS, ids="-".join)
@pytest.mark.parametrize("view", VIEWS)
def test_dtypes_and_views(engine, oracle, rng, view, dtypes):
    shape, look = VIEWS[view]
    logp, old_logp = (look(array) for array in log_probabilities(rng, shape, dtypes))
    masks = overlapping_masks(rng, tuple(logp.shape))
    oracle.check_call(engine, logp, old_logp, masks)


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_everything(engine, oracle, rng, view):
    """Masks, base mask and log-probabilities all seen through the same view, the old ones contiguous."""
    shape, look = VIEWS[view]
    logp, old_logp = log_probabilities(rng, shape, ("float32", "float32"))
    masks = {name: look(mask) for name, mask in overlapping_masks(rng, shape).items()}
    base = torch.from_numpy(np.asarray(rng.random(shape) < 0.8))
    oracle.check_call(engine, look(logp), look(old_logp).contiguous(), masks, mask=look(base))


NUMPY_VIEWS: dict[str, Any] = {
    "contiguous": lambda a: a,
    "Fortran order": np.asfortranarray,
    "transposed": lambda a: a.T,
    "[:, 1:]": lambda a: a[:, 1:],
    "step 2": lambda a: a[:, ::2],
    "reversed": lambda a: a[:, ::-1],
    "reversed both ways": lambda a: a[::-1, ::-1],
    "reversed, step -3": lambda a: a[::-1, ::-3],
    "flat, reversed": lambda a: a.reshape(-1)[::-1],
    "read-only": lambda a: _read_only(a),
    "unaligned": lambda a: _unaligned(a),
    "broadcast": lambda a: np.broadcast_to(a[:1], a.shape),
}


def _read_only(array: np.ndarray) -> np.ndarray:
    copy = array.copy()
    copy.flags.writeable = False
    return copy


def _unaligned(array: np.ndarray) -> np.ndarray:
    buffer = np.zeros(array.nbytes + 1, np.uint8)
    view = buffer[1:].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


@pytest.mark.parametrize("dtypes", [(np.float32,) * 2, (np.float64,) * 2, (np.float16, np.float32)], ids=str)
@pytest.mark.parametrize("view", NUMPY_VIEWS)
def test_numpy_views(engine, oracle, rng, view, dtypes):
    look, shape = NUMPY_VIEWS[view], (19, 104)
    with np.errstate(over="ignore"):
        logp, old_logp = (
            array.numpy().astype(dtype)
            for array, dtype in zip(log_probabilities(rng, shape, ("float64", "float64")), dtypes, strict=True)
        )
    masks = {name: look(mask.numpy()) for name, mask in overlapping_masks(rng, shape).items()}
    masks["third"] = look(rng.integers(0, 3, shape, dtype=np.int16))
    stats = engine.stats(look(logp), look(old_logp), masks)
    assert isinstance(stats.state.buffer, np.ndarray) == engine.takes_numpy
    oracle.check_call(engine, look(logp), look(old_logp), masks)


def test_numpy_and_torch_give_the_same_bits(engine, rng):
    logp, old_logp = log_probabilities(rng, (13, 400), ("float32", "float32"))
    masks = overlapping_masks(rng, (13, 400))
    from_torch = engine.state(logp, old_logp, masks)
    from_numpy = engine.state(logp.numpy(), old_logp.numpy(), {name: mask.numpy() for name, mask in masks.items()})
    assert np.array_equal(from_torch.buffer, from_numpy.buffer)


# masks of one kind for logp of shape (12, 90)
def _broadcasts(rng: np.random.Generator) -> dict[str, np.ndarray]:
    shapes = {"full": (12, 90), "[B, 1]": (12, 1), "[T]": (90,), "[1, T]": (1, 90), "[1, 1]": (1, 1), "0-d": ()}
    return {name: np.asarray(rng.random(shape) < 0.6) for name, shape in shapes.items()}


def test_masks_broadcast_to_the_shape_of_logp(engine, oracle, rng):
    logp, old_logp = log_probabilities(rng, (12, 90), ("float32", "bfloat16"))
    masks = {name: torch.from_numpy(mask) for name, mask in _broadcasts(rng).items()}
    for name, base in masks.items():
        state = oracle.check_call(engine, logp, old_logp, masks, mask=base)
        full = {key: mask.expand(12, 90).contiguous() for key, mask in masks.items()}
        explicit = engine.state(logp, old_logp, full, mask=base.expand(12, 90).contiguous())
        assert np.array_equal(state.buffer, explicit.buffer), name


@pytest.mark.parametrize("dtype", MASK_DTYPES, ids=str)
def test_any_value_but_zero_is_a_member(engine, oracle, rng, dtype):
    """Among them values whose low byte, or whose float32 rounding, is zero."""
    values = {
        torch.bool: [False, True],
        torch.float16: [0.0, -0.0, 1.0, 0.25, -3.0, 6e-8, float("nan"), float("inf"), float("-inf")],
        torch.bfloat16: [0.0, -0.0, 1.0, 0.25, -3.0, 1e-38, float("nan"), float("inf"), float("-inf")],
        torch.float32: [0.0, -0.0, 1.0, 0.25, -3.0, 1e-45, float("nan"), float("inf"), float("-inf")],
        torch.float64: [0.0, -0.0, 1.0, 0.25, -3.0, 5e-324, float("nan"), float("inf"), float("-inf")],
    }.get(dtype)
    if values is None:
        info = torch.iinfo(dtype)
        candidates = (0, 1, 2, -1, 128, 256, 1 << 15, 1 << 16, 1 << 31, 1 << 32, 1 << 63, info.min, info.max)
        values = [value for value in candidates if info.min <= value <= info.max]
    table = torch.tensor(values, dtype=dtype)
    logp, old_logp = log_probabilities(rng, (700,), ("float32", "float32"))
    chosen = torch.from_numpy(rng.integers(0, len(values), 700))
    mask = torch.stack([table[index] for index in chosen])  # no torch.take for every unsigned dtype
    expected = sum(values[int(index)] != 0 for index in chosen)
    for masks, options in ((mask, {}), ({"a": mask, "b": mask[:1]}, {}), ({"a": mask}, {"mask": mask.clone()})):
        state = oracle.check_call(engine, logp, old_logp, masks, **options)
        assert state.count("n_tokens")[0] == expected
    state = oracle.check_call(engine, logp, old_logp, None, mask=mask)
    assert state.count("n_tokens")[0] == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("slices", [1, 2, 4, 7])
def test_clean_batches(engine, oracle, rng, slices, dtype):
    """Nothing odd anywhere, contiguous bool masks, a full one among them: the paths that a real run takes."""
    for n in (4096, 20_000):
        x = rng.standard_normal(n) * 1e-3 * (1 + np.abs(rng.standard_normal(n)) ** 3)
        old_logp = -rng.gamma(0.7, 2.0, n)
        logp, old_logp = (torch.from_numpy(array).to(FLOATS[dtype]) for array in (old_logp + x, old_logp))
        chance = rng.random(n)
        shares = [1.0, *rng.uniform(0.05, 0.95, slices - 1)]
        masks = {f"s{index}": torch.from_numpy(chance < share) for index, share in enumerate(shares)}
        oracle.check_call(engine, logp, old_logp, masks)
        oracle.check_call(engine, logp, old_logp, masks, mask=torch.from_numpy(rng.random(n) < 0.5))
        ids = torch.from_numpy(rng.integers(0, slices, n))
        oracle.check_call(engine, logp, old_logp, slice_ids=ids, names=list(masks))


@pytest.mark.parametrize("slices", [1, 2, 3, 4, 5, 8, 16, 17, 32, 33, 64, 65])
@pytest.mark.parametrize("kind", ["masks", "slice_ids"])
def test_numbers_of_slices(engine, oracle, rng, slices, kind):
    """Overlapping masks, among them empty and full ones; ids that leave some slices empty."""
    shape, names = (7, 301), [f"s{index}" for index in range(slices)]
    logp, old_logp = log_probabilities(rng, shape, ("float32", "float32"))
    base = torch.from_numpy(rng.random(shape) < 0.9)
    if kind == "masks":
        shares = rng.choice([0.0, 0.02, 0.3, 0.9, 1.0], slices)
        masks = [torch.from_numpy(rng.random(shape) < share) for share in shares]
        oracle.check_call(engine, logp, old_logp, masks, names=names)
        oracle.check_call(engine, logp, old_logp, dict(zip(names, masks, strict=True)), mask=base)
    else:
        ids = torch.from_numpy(rng.integers(-2, slices + 3, shape))
        ids[ids == slices // 2] = -1
        oracle.check_call(engine, logp, old_logp, slice_ids=ids, names=names)
        oracle.check_call(engine, logp, old_logp, slice_ids=ids.to(torch.int32), names=names, mask=base)


@pytest.mark.parametrize("dtype", ID_DTYPES, ids=str)
def test_slice_ids(engine, oracle, rng, dtype):
    """Negative ids are in no slice, large ones are counted apart, also those that a narrower integer would wrap."""
    info = torch.iinfo(dtype)
    candidates = (0, 1, 2, 3, 4, 127, 255, 256, 257, 1 << 16, (1 << 16) + 1, 1 << 31, 1 << 32, (1 << 32) + 1)
    candidates += (-1, -2, -128, -(1 << 32), info.min, info.max, info.max - 2)
    values = [value for value in candidates if info.min <= value <= info.max]
    table = torch.tensor(values, dtype=dtype)
    shape = (6, 150)
    logp, old_logp = log_probabilities(rng, shape, ("bfloat16", "bfloat16"))
    chosen = rng.integers(0, len(values), shape)
    ids = torch.stack([table[index] for index in chosen.reshape(-1)]).reshape(shape)
    state = oracle.check_call(engine, logp, old_logp, slice_ids=ids, names=["a", "b", "c"])
    taken = np.array(values, dtype=object)[chosen]
    assert state.count("n_tokens").tolist() == [np.count_nonzero(taken == index) for index in range(3)]
    assert state.count("n_out_of_range").sum() == np.count_nonzero(taken >= 3)


def test_slice_ids_broadcast_and_agree_with_masks(engine, oracle, rng):
    logp, old_logp = log_probabilities(rng, (9, 220), ("float32", "float32"))
    names = ["a", "b", "c", "d"]
    base = torch.from_numpy(rng.random((9, 220)) < 0.7)
    for shape in ((9, 220), (9, 1), (220,), ()):
        ids = torch.from_numpy(np.asarray(rng.integers(-1, 4, shape)))
        by_id = oracle.check_call(engine, logp, old_logp, slice_ids=ids, names=names, mask=base)
        masks = [ids == index for index in range(4)]
        by_mask = oracle.check_call(engine, logp, old_logp, masks, names=names, mask=base)
        assert np.array_equal(by_id.counts, by_mask.counts)
        assert np.array_equal(by_id.histogram, by_mask.histogram)
        assert np.array_equal(by_id.maxima, by_mask.maxima)


def test_ids_out_of_range_are_not_counted_outside_the_base_mask(engine):
    ids = torch.tensor([0, 5, 5, -1, 1])
    state = engine.state(
        torch.zeros(5), torch.zeros(5), slice_ids=ids, names=["a", "b"], mask=torch.tensor([1, 1, 0, 1, 0])
    )
    assert state.count("n_out_of_range").tolist() == [1, 0]
    assert state.count("n_tokens").tolist() == [1, 0]


def test_no_mask(engine, oracle, rng):
    for shape in ((), (1,), (4097,), (31, 65)):
        for dtypes in DTYPE_PAIRS:
            logp, old_logp = log_probabilities(rng, shape, dtypes)
            oracle.check_call(engine, logp, old_logp)
            base = torch.from_numpy(np.asarray(rng.random(shape) < 0.5))
            oracle.check_call(engine, logp, old_logp, mask=base)


def test_every_small_size(engine, oracle, rng):
    """Tails of vector loops: 0 to 70 tokens, and around the powers of two."""
    sizes = [*range(71), *(power + d for power in (128, 256, 512, 1024, 4096, 8192) for d in (-1, 0, 1))]
    logp, old_logp = log_probabilities(rng, (max(sizes),), ("float32", "float32"))
    half, half_old = logp.to(torch.bfloat16), old_logp.to(torch.bfloat16)
    masks = overlapping_masks(rng, (max(sizes),))
    for size in sizes:
        part = {name: mask[:size] for name, mask in masks.items()}
        oracle.check_call(engine, logp[:size], old_logp[:size], part)
        oracle.check_call(engine, half[:size], half_old[:size])


ADVERSARIAL: dict[str, Any] = {
    "nothing finite": lambda rng, n: rng.choice([np.nan, np.inf, -np.inf], n),
    "zeros of both signs": lambda rng, n: rng.choice([0.0, -0.0], n),
    "subnormals": lambda rng, n: rng.choice([1, -1], n) * rng.integers(1, 1 << 23, n) * 2.0**-149,
    "smallest normals": lambda rng, n: rng.choice([1, -1], n) * rng.uniform(1, 4, n) * 2.0**-126,
    "tiny": lambda rng, n: rng.normal(0, 1e-5, n),
    "one sign": lambda rng, n: -np.abs(rng.normal(0, 1e-3, n)),
    "all equal": lambda rng, n: np.full(n, rng.normal()),
    "around the near limit": lambda rng, n: rng.choice(np.float32([0.5, -0.5, 0.49999997, -0.49999997, 0.50000006]), n),
    "around the clip": lambda rng, n: rng.choice([1, -1], n) * rng.uniform(0.18, 0.23, n),
    "far, moderate": lambda rng, n: rng.normal(0, 4, n),
    "far, large": lambda rng, n: rng.normal(0, 200, n),
    "all 5000": lambda rng, n: np.full(n, 5000.0),
    "all -300": lambda rng, n: np.full(n, -300.0),
    "5000 and -300": lambda rng, n: rng.choice([5000.0, -300.0, 4999.5], n),
    "near -300": lambda rng, n: rng.normal(-300, 1, n),
    "near -20": lambda rng, n: rng.normal(-20, 0.1, n),
    "one outlier": lambda rng, n: np.where(np.arange(n) == n // 2, 30.0, rng.normal(0, 1e-3, n)),
    "one low outlier": lambda rng, n: np.where(np.arange(n) == n // 2, -100.0, rng.normal(0, 1e-3, n)),
    "ascending maxima": lambda rng, n: np.sort(rng.normal(0, 300, n)),
    "descending maxima": lambda rng, n: np.sort(rng.normal(0, 300, n))[::-1],
    "float32 limits": lambda rng, n: rng.choice([3.4028235e38, -3.4028235e38, 1e38, -1.0, 0.0], n),
    "exponents": lambda rng, n: rng.choice([1, -1], n) * 2.0 ** rng.integers(-149, 128, n),
    "overflow of exp": lambda rng, n: rng.uniform(709, 711, n),
}


@pytest.mark.parametrize("data", ADVERSARIAL)
def test_adversarial_data(engine, oracle, rng, data):
    """x itself as logp beside zeros, and as float64 pairs; slices that see all of it, some of it, none."""
    x = np.ascontiguousarray(ADVERSARIAL[data](rng, 5003)).astype(np.float32)
    for array in (torch.from_numpy(x), torch.from_numpy(x.astype(np.float64)), x):
        zeros = np.zeros_like(x) if array is x else torch.zeros_like(array)
        masks = {name: mask.numpy() if array is x else mask for name, mask in overlapping_masks(rng, x.shape).items()}
        masks["every"] = np.ones(1, bool) if array is x else torch.ones(1, dtype=torch.bool)
        oracle.check_call(engine, array, zeros, masks)
        oracle.check_call(engine, zeros, array, masks)


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_every_bit_pattern_of_a_half_precision_dtype(engine, oracle, rng, name):
    """Widening is exact: subnormals, NaN and infinities of both signs; against 0, 1 and a shuffle of themselves."""
    pattern = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(FLOATS[name])
    shuffled = pattern[torch.from_numpy(rng.permutation(1 << 16))]
    for old_logp in (torch.zeros_like(pattern), torch.ones_like(pattern)):
        oracle.check_call(engine, pattern, old_logp)
    oracle.check_call(engine, pattern, shuffled, slice_ids=torch.arange(1 << 16) % 3, names=list("abc"))


def test_inputs_are_widened_before_the_subtraction(engine):
    """bfloat16 has 8 bits: 1 + 2^-7 minus 2^-8 needs 9. float64 is subtracted in float64 and rounded once."""
    new, old = torch.tensor([1.0078125]).bfloat16(), torch.tensor([0.00390625]).bfloat16()
    assert engine.state(new, old).maximum("max_x")[0] == 1.00390625
    new64, old64 = torch.tensor([1e-9 + 3.0], dtype=torch.float64), torch.tensor([3.0], dtype=torch.float64)
    assert engine.state(new64, old64).maximum("max_x")[0] == np.float32(float(new64) - 3.0) > 0
    assert engine.state(new64, old64.float()).maximum("max_x")[0] == np.float32(float(new64) - 3.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_difference_that_overflows_float32_counts_as_infinite(engine, dtype):
    big = torch.tensor([3e38, -3e38, 3e38], dtype=dtype)
    state = engine.state(big, -big * torch.tensor([1, 1, -1], dtype=dtype))
    assert [state.count(name)[0] for name in ("n_tokens", "n_pos_inf", "n_neg_inf", "n_zero")] == [3, 1, 1, 1]


def test_values_outside_the_masks_change_nothing(engine, oracle, rng):
    """Poison under every masked-out position: the state keeps its bits."""
    shape = (11, 333)
    logp, old_logp = log_probabilities(rng, shape, ("float32", "float32"))
    logp.nan_to_num_(0.0, 1.0, -1.0)
    old_logp.nan_to_num_()
    masks, base = overlapping_masks(rng, shape), torch.from_numpy(rng.random(shape) < 0.5)
    ids = torch.from_numpy(rng.integers(-3, 3, shape))
    outside_masks = ~(torch.stack(list(masks.values())).any(0) & base)
    for options, outside in (
        ({"masks": masks, "mask": base}, outside_masks),
        ({"slice_ids": ids, "names": ["a", "b", "c"], "mask": base}, ~((ids >= 0) & base)),
        ({"mask": base}, ~base),
    ):
        clean = engine.state(torch.where(outside, 0.0, logp), torch.where(outside, 0.0, old_logp), **options)
        for poison in (float("nan"), -float("nan"), float("inf"), float("-inf"), 3.4e38):
            for poisoned in (
                (torch.where(outside, poison, logp), old_logp),
                (logp, torch.where(outside, poison, old_logp)),
                (torch.where(outside, poison, logp), torch.where(outside, poison, old_logp)),
            ):
                assert np.array_equal(engine.state(*poisoned, **options).buffer, clean.buffer)


def test_one_bad_token_in_a_slice_leaves_the_other_slices_alone(engine, rng):
    logp, old_logp = log_probabilities(rng, (400,), ("float32", "float32"))
    logp.nan_to_num_(0.0, 1.0, -1.0)
    masks = {"clean": torch.arange(400) != 200, "dirty": torch.ones(400, dtype=torch.bool)}
    before = engine.state(logp, old_logp, masks)
    logp[200] = float("nan")
    after = engine.state(logp, old_logp, masks)
    for view in ("counts", "histogram", "sums", "maxima"):
        assert np.array_equal(getattr(before, view)[0], getattr(after, view)[0]), view
    assert after.count("n_nan").tolist() == [0, 1]
    assert not np.isnan(after.sums).any()


@pytest.mark.parametrize(
    "layout",
    [Layout(), Layout(0), Layout(10, -8, 8), Layout(5, -24, 40), Layout(3, -126, 2), Layout(7, -1, 0)],
    ids=str,
)
def test_layouts(engine, oracle, rng, layout):
    logp, old_logp = log_probabilities(rng, (3000,), ("float32", "float32"))
    oracle.check_call(engine, logp, old_logp, overlapping_masks(rng, (3000,)), layout=layout)


def test_extrema_of_runs(engine, oracle, rng):
    """Equal neighbours, far and near, zeros between them: an extremum found in one block outlives the next one."""
    runs = [(1.25, 27), (0.0, 37), (-0.0005, 13), (0.0, 51)]
    x = torch.cat([torch.full((length,), value) for value, length in runs])
    state = engine.state(x, torch.zeros(128))
    assert (state.maximum("max_x")[0], state.maximum("neg_min_x")[0]) == (1.25, np.float32(0.0005))
    for _ in range(50):
        values = rng.standard_normal(30) * 10.0 ** rng.uniform(-8, 1.7, 30) * (rng.random(30) < 0.6)
        x = torch.from_numpy(np.repeat(values, rng.integers(1, 130, 30)).astype(np.float32))
        oracle.check_call(engine, x, torch.zeros(len(x)))


def test_equal_tokens_in_full_groups(engine, oracle, rng):
    """Rounding errors of equal tokens all point one way: they may not add up."""
    for _ in range(200):
        value = rng.uniform(0.5, 20.0) * rng.choice([-1.0, 1.0])
        x = torch.full((int(rng.integers(64, 400)),), value)
        oracle.check_call(engine, x, torch.zeros(len(x)))


@pytest.mark.parametrize("mantissa_bits", [0, 7, 8, 10])
def test_layouts_with_many_tokens(engine, oracle, rng, mantissa_bits):
    """Few and many bins while many tokens pass: whatever is flushed on the way has room."""
    if engine.backend == "torch" and mantissa_bits:
        pytest.skip("block by block, whatever the number of tokens")
    logp, old_logp = log_probabilities(rng, (300_001,), ("float32", "float32"))
    oracle.check_call(engine, logp, old_logp, layout=Layout(mantissa_bits))
    masks = {name: torch.from_numpy(rng.random(300_001) < share) for name, share in (("a", 0.9), ("b", 0.4))}
    oracle.check_call(engine, logp, old_logp, masks, layout=Layout(mantissa_bits))


def test_inputs_that_require_grad(engine, oracle, rng):
    """Detached inside: the state knows of no graph."""
    logp, old_logp = log_probabilities(rng, (500,), ("float32", "bfloat16"))
    mask = torch.from_numpy(rng.random(500) < 0.5).float()
    wanted = engine.state(logp, old_logp, mask)
    graph = (logp.requires_grad_() * 1.0, old_logp.requires_grad_() * 1.0, mask.requires_grad_() * 1.0)
    stats = engine.stats(*graph, mask=graph[2])
    assert not stats.state.buffer.requires_grad
    assert np.array_equal(stats.state.to_host().buffer, wanted.buffer)


@pytest.mark.parametrize("clip", [(0.2, 0.2), (0.2, 0.28), (1e-6, 1e-6), (0.999, 1000.0), (0.5, 1e30)], ids=str)
def test_clips(engine, oracle, rng, clip):
    """Also on the thresholds themselves, which are not clipped, and on their float32 neighbours."""
    low, high = np.float32(np.log1p(-clip[0])), np.float32(np.log1p(clip[1]))
    around = [np.nextafter(edge, np.float32(to)) for edge in (low, high) for to in (-np.inf, np.inf)]
    x = np.concatenate((np.float32([low, high, *around]), rng.normal(0, 0.3, 2000).astype(np.float32)))
    state = oracle.check_call(engine, torch.from_numpy(x), torch.zeros(len(x)), clip=clip)
    assert state.count("clip_low")[0] == np.count_nonzero(x < low)
    assert state.count("clip_high")[0] == np.count_nonzero(x > high)
    assert engine.state(x[:6], np.zeros(6, np.float32), clip=clip).count("clip_low")[0] == 1
    assert engine.state(x[:6], np.zeros(6, np.float32), clip=clip).count("clip_high")[0] == 1


def test_many_tokens(engine, oracle, rng):
    """More than one block, one thread or one flush of whatever a backend does inside; the same bits twice."""
    n = 400_011
    logp, old_logp = log_probabilities(rng, (n,), ("float32", "float32"))
    masks = overlapping_masks(rng, (n,))
    state = oracle.check_call(engine, logp, old_logp, masks)
    assert np.array_equal(engine.state(logp, old_logp, masks).buffer, state.buffer)
    ids = torch.from_numpy(rng.integers(-1, 9, n))
    state = oracle.check_call(engine, logp, old_logp, slice_ids=ids, names=[f"s{index}" for index in range(8)])
    assert np.array_equal(
        engine.state(logp, old_logp, slice_ids=ids, names=[f"s{index}" for index in range(8)]).buffer, state.buffer
    )


def test_one_value_in_one_bin(engine):
    """2^24 + 5 equal tokens: float32 counts stop at 2^24, 16-bit lanes wrap long before."""
    n = (1 << 24) + 5
    x = torch.tensor([0.0625], dtype=torch.float32).expand(n)
    state = engine.state(x, torch.zeros(1).expand(n))
    assert state.histogram.max() == state.histogram.sum() == state.count("n_tokens")[0] == n
    assert state.sum("near_x")[0] == 0.0625 * n
    assert state.sum("near_x2")[0] == 0.0625**2 * n


def test_half_precision_zeros_are_counted_one_by_one(engine):
    """100 000 zeros: counts kept in the dtype of the data stop at 4096 for float16 and at 512 for bfloat16."""
    for dtype in (torch.float16, torch.bfloat16):
        zeros = torch.zeros(100_000, dtype=dtype)
        assert engine.state(zeros, zeros).count("n_zero")[0] == 100_000


def test_accumulating_continues_a_state(engine, oracle, rng):
    """Many updates equal one call: integers and extrema to the bit, sums to 1e-12 of their magnitudes."""
    logp, old_logp = log_probabilities(rng, (5000,), ("float32", "float32"))
    masks = overlapping_masks(rng, (5000,))
    accumulator = pyrlstats.SliceAccumulator(list(masks))
    cuts = [0, 1, 2, 17, 500, 500, 1024, 4999, 5000]
    with engine.forced():
        for start, stop in itertools.pairwise(cuts):
            part = {name: mask[start:stop] for name, mask in masks.items()}
            accumulator.update(logp[start:stop], old_logp[start:stop], part)
    wanted = oracle.state(logp, old_logp, masks)
    x = (logp - old_logp).abs()
    oracle.check(
        accumulator.compute().state.to_host(),
        wanted,
        oracle.state(x, torch.zeros(5000), masks),
        f"{engine} in pieces",
        parts=engine.parts,
    )
