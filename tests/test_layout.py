"""Bins: every edge and its float neighbours on every backend, nesting, the inverse pair, the generated header."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from pyrlstats import layout as table
from pyrlstats.layout import Layout

LAYOUTS = [
    Layout(),
    Layout(0),
    Layout(1, -2, 2),
    Layout(5, -24, 40),
    Layout(7, -1, 0),
    Layout(8, -24, 8),
    Layout(10, -8, 8),
    Layout(2, -126, 2),  # the lowest octave of the normal floats
    Layout(3, 120, 128),  # the highest: above every far and near limit
    Layout(0, -64, 64),
]
FLT_MAX = float(np.finfo(np.float32).max)
SPECIAL = np.float32(
    [
        *(0.0, 1e-45, 2e-45, 1.1754942e-38, 1.1754944e-38, FLT_MAX, 3.4028233e38),
        *(0.49999997, 0.5, 0.50000006, 1.0, 2.0**-24, 2.0**-25, 256.0, 255.99998),
    ]
)
NAN_BITS = [0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0x7FC00001, 0x7FFFFFFF]
NAN_BITS += [bits | 0x80000000 for bits in NAN_BITS]


def bits_of(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32).view(np.int32)


def from_bits(bits: list[int] | np.ndarray) -> np.ndarray:
    return np.array(bits, np.uint32).view(np.float32)


def every_edge_and_its_neighbours(layout: Layout) -> np.ndarray:
    """float32 (n,): each inner edge of abs(x), the float below, the float above, and SPECIAL; of both signs."""
    edges = np.float32(layout.abs_edges[1:-1])
    assert np.array_equal(edges.astype(np.float64), layout.abs_edges[1:-1])  # edges are float32 numbers
    below, above = np.nextafter(edges, np.float32(0)), np.nextafter(edges, np.float32(np.inf))
    values = np.concatenate((below, edges, above, SPECIAL))
    values = values[np.isfinite(values)]
    return np.concatenate((-values[::-1], values))


def bin_by_search(layout: Layout, x: np.ndarray) -> np.ndarray:
    """The bin of finite x != 0 from the edges alone: lower edge included towards 0, both signs alike."""
    pos = np.searchsorted(np.array(layout.abs_edges), np.abs(x.astype(np.float64)), side="right") - 1
    return np.where(x > 0, layout.bins_per_sign + pos, layout.bins_per_sign - 1 - pos)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_formula_agrees_with_the_edges(layout):
    x = every_edge_and_its_neighbours(layout)
    x = x[x != 0]
    assert np.array_equal(layout.bin_index(bits_of(x)), bin_by_search(layout, x))
    assert torch.equal(layout.bin_index(torch.from_numpy(bits_of(x))), torch.from_numpy(bin_by_search(layout, x)))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_edge_and_its_neighbours(engine, layout):
    """Neighbours go to different slices, so that a value in a wrong bin cannot hide behind another one."""
    x = every_edge_and_its_neighbours(layout)
    slices = 13
    ids = np.arange(len(x)) % slices
    state = engine.state(
        x, np.zeros_like(x), slice_ids=ids, names=[f"s{index}" for index in range(slices)], layout=layout
    )
    wanted = np.zeros((slices, layout.n_bins), np.int64)
    nonzero = x != 0
    np.add.at(wanted, (ids[nonzero], bin_by_search(layout, x[nonzero])), 1)
    slice_, bin_ = np.nonzero(state.histogram != wanted)
    assert not len(bin_), f"slices {slice_[:9]} bins {bin_[:9]}: {state.histogram[slice_, bin_][:9]}"
    assert np.array_equal(state.count("n_zero"), np.bincount(ids[~nonzero], minlength=slices))
    for index in range(slices):
        assert state.maximum("max_x")[index] == x[ids == index].max()
        assert state.maximum("neg_min_x")[index] == -x[ids == index].min()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_edges_in_other_dtypes(engine, dtype, layout):
    x = torch.from_numpy(every_edge_and_its_neighbours(layout)).to(dtype)
    state = engine.state(x, torch.zeros_like(x))
    seen = x.float().numpy()
    finite = seen[np.isfinite(seen)]
    wanted = np.bincount(bin_by_search(layout, finite[finite != 0]), minlength=layout.n_bins)
    assert np.array_equal(state.histogram[0], wanted)
    assert state.count("n_zero")[0] == np.count_nonzero(finite == 0)


def test_nan_payloads_and_infinities_have_counters_of_their_own(engine):
    nan = from_bits(NAN_BITS)
    x = np.concatenate((nan, np.float32([np.inf, np.inf, -np.inf, 0.0, -0.0, 1.0])))
    wide = torch.from_numpy(x).double().numpy()  # NumPy warns of signalling NaN
    for logp, old_logp in ((x, np.zeros_like(x)), (wide, np.zeros(len(x)))):
        state = engine.state(logp, old_logp)
        counted = {
            name: int(state.count(name)[0]) for name in ("n_tokens", "n_nan", "n_pos_inf", "n_neg_inf", "n_zero")
        }
        assert counted == {"n_tokens": len(x), "n_nan": len(nan), "n_pos_inf": 2, "n_neg_inf": 1, "n_zero": 2}
        assert state.histogram.sum() == 1
        assert np.isfinite(state.sums).all()
        assert state.maximum("max_x")[0] == 1.0


def test_nan_payloads_and_infinities_outside_the_mask_are_not_seen(engine):
    poison = np.concatenate((from_bits(NAN_BITS), np.float32([np.inf, -np.inf, FLT_MAX, -FLT_MAX, 1e-45, -0.0])))
    x = np.concatenate((poison, np.float32([0.25])))
    member = np.zeros(len(x), bool)
    member[-1] = True
    ids = np.where(member, 0, -1)
    for logp, old_logp in ((x, np.zeros_like(x)), (np.where(member, x, 0), np.where(member, 0, x))):
        logp, old_logp = logp.astype(np.float32), old_logp.astype(np.float32)
        for options in ({"masks": member}, {"mask": member}, {"slice_ids": ids, "names": ["all"]}):
            state = engine.state(logp, old_logp, **options)
            clean = engine.state(x[member], np.zeros(1, np.float32))
            assert np.array_equal(state.buffer, clean.buffer)


def test_infinity_minus_infinity_is_nan(engine):
    inf = math.inf
    logp = torch.tensor([-inf, inf, -inf, inf, 0.0, 0.0])
    old_logp = torch.tensor([-inf, inf, 0.0, 0.0, -inf, inf])
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        state = engine.state(logp.to(dtype), old_logp.to(dtype))
        assert [state.count(name)[0] for name in ("n_nan", "n_pos_inf", "n_neg_inf")] == [2, 2, 2]


def test_subnormal_differences_are_not_flushed(engine):
    """The smallest float32 is no zero, whatever the floating-point mode of the vector unit."""
    x = np.float32([1e-45, -1e-45, 0.0, 1e-39])
    state = engine.state(x, np.zeros(4, np.float32))
    assert state.count("n_zero")[0] == 1
    assert state.maximum("neg_min_x")[0] == np.float32(1e-45)
    difference = engine.state(np.float32([1.1754945e-38]), np.float32([1.1754944e-38]))
    assert difference.count("n_zero")[0] == 0
    assert difference.maximum("max_x")[0] == np.float32(1e-45)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_edges_and_bins_are_an_inverse_pair(layout):
    edges = layout.abs_edges
    positive = layout.bins_per_sign
    assert len(edges) == positive + 1
    assert edges[0] == 0.0
    assert edges[-1] == math.inf
    assert all(low < high for low, high in itertools.pairwise(edges))
    bits = bits_of(np.array(edges[1:-1]))
    assert layout.bin_index(bits).tolist() == list(range(positive + 1, 2 * positive))
    assert layout.bin_index(bits | np.int32(-(1 << 31))).tolist() == list(range(positive - 2, -1, -1))
    # the first and the last bin of a sign catch what lies beyond the window
    outside = bits_of(np.float32([1e-45, FLT_MAX, -1e-45, -FLT_MAX]))
    assert layout.bin_index(outside).tolist() == [positive, 2 * positive - 1, positive - 1, 0]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_relative_width_of_a_bin(layout):
    edges = np.array(layout.abs_edges[1:-1])
    assert ((edges[1:] - edges[:-1]) / edges[:-1] <= 2.0**-layout.mantissa_bits).all()
    # below the window the error is absolute
    assert edges[0] <= 2.0**layout.min_exp * (1 + 2.0**-layout.mantissa_bits)
    # 2^max_exp is where the last bin ends, were it not for what lies above
    assert edges[-1] < 2.0**layout.max_exp


def test_default_layout():
    layout = Layout()
    assert (layout.mantissa_bits, layout.min_exp, layout.max_exp) == (5, -24, 8)
    assert layout.n_bins == 2048
    assert layout.bins_per_sign == 1024
    assert layout == Layout(5, -24, 8)
    assert hash(layout) == hash(Layout(5, -24, 8))
    assert layout != Layout(6, -24, 8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.min_exp = 0  # type: ignore[misc]


@pytest.mark.parametrize("mantissa_bits", range(1, 11))
def test_a_bin_at_m_minus_1_is_the_bin_at_m_shifted_right(mantissa_bits, rng):
    fine, coarse = Layout(mantissa_bits, -8, 8), Layout(mantissa_bits - 1, -8, 8)
    x = (rng.choice([-1, 1], 20_000) * 10.0 ** rng.uniform(-6, 6, 20_000)).astype(np.float32)
    x = np.concatenate((x, every_edge_and_its_neighbours(fine)))
    bits = bits_of(x[x != 0])
    assert np.array_equal(fine.bin_index(bits) >> 1, coarse.bin_index(bits))


def test_a_finer_histogram_converts_to_a_coarser_one_exactly(engine, rng):
    x = rng.standard_normal(5000).astype(np.float32)
    zeros = np.zeros_like(x)
    coarse = engine.state(x, zeros, layout=Layout(0)).histogram[0]
    for mantissa_bits in (1, 3, 5, 8):
        fine = engine.state(x, zeros, layout=Layout(mantissa_bits)).histogram[0]
        assert np.array_equal(fine.reshape(-1, 1 << mantissa_bits).sum(1), coarse)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((-1,), ValueError, "mantissa_bits must be from 0 to 10, got -1"),
        ((11,), ValueError, "mantissa_bits must be from 0 to 10, got 11"),
        ((5.0,), TypeError, "mantissa_bits must be an int, got float"),
        ((True,), TypeError, "mantissa_bits must be an int, got bool"),
        ((5, "a"), TypeError, "min_exp must be an int, got str"),
        ((5, -24, None), TypeError, "max_exp must be an int, got NoneType"),
        ((5, -127, 1), ValueError, "got min_exp=-127, max_exp=1"),
        ((5, 0, 129), ValueError, "got min_exp=0, max_exp=129"),
        ((5, 8, 8), ValueError, "min_exp < max_exp"),
        ((5, 8, -24), ValueError, "min_exp < max_exp"),
        ((5, -24, 7), ValueError, "must be a power of two, got 31: try max_exp=8"),
        ((5, -24, 9), ValueError, "must be a power of two, got 33: try max_exp=40"),
    ],
)
def test_impossible_layouts(arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        Layout(*arguments)


def test_a_cure_that_the_message_names_works():
    """Also near the top of the exponents, where doubling the window may not fit."""
    for min_exp in range(-126, 128):
        for max_exp in range(min_exp + 1, 129):
            octaves = max_exp - min_exp
            if octaves & (octaves - 1):
                with pytest.raises(ValueError, match="power of two") as caught:
                    Layout(0, min_exp, max_exp)
                [(field, value)] = re.findall(r"try (\w+)=(-?\d+)", str(caught.value))
                Layout(**{"mantissa_bits": 0, "min_exp": min_exp, "max_exp": max_exp, field: int(value)})


def test_accumulators_are_named_once():
    names = (*table.COUNTS, *table.SUMS, *table.MAXIMA)
    assert len(set(names)) == len(names)
    assert table.float32_from_bits(table.NEAR_BITS) == table.NEAR_LIMIT
    assert table.float32_from_bits(table.INF_BITS) == math.inf


def test_the_near_limit_is_a_bin_edge():
    assert table.NEAR_LIMIT in Layout().abs_edges
    assert table.NEAR_LIMIT in Layout(0, -4, 4).abs_edges


def test_clip_thresholds_are_rounded_to_float32_once():
    low, high = table.clip_thresholds((0.2, 0.28))
    assert low == np.float32(np.log1p(-0.2))
    assert high == np.float32(np.log1p(0.28))


def _run_as_the_build_does() -> str:
    run = subprocess.run([sys.executable, "-I", table.__file__], capture_output=True, text=True, check=True)
    return run.stdout


def test_layout_runs_alone_on_the_standard_library():
    assert _run_as_the_build_does() == table.c_header()
    code = f"import sys; sys.path.insert(0, {str(Path(table.__file__).parent)!r}); import layout; print(*sys.modules)"
    modules = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"numpy", "torch", "pyrlstats"} & set(modules)


def _compiled_constants(tmp_path: Path) -> dict[str, float]:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    header = table.c_header()
    (tmp_path / "layout.h").write_text(header)
    prefixes = {"kCount": table.COUNTS, "kSum": table.SUMS, "kMax": table.MAXIMA}
    names = [prefix + name.title().replace("_", "") for prefix, rows in prefixes.items() for name in rows]
    names += [prefix + "Size" for prefix in prefixes]
    names += re.findall(r"constexpr \w+ (\w+) =", header)
    prints = "\n".join(f'  std::printf("{name} %.17g\\n", static_cast<double>(layout::{name}));' for name in names)
    (tmp_path / "print.cc").write_text(f'#include "layout.h"\n#include <cstdio>\nint main() {{\n{prints}\n}}\n')
    binary = tmp_path / "print"
    subprocess.run(
        [compiler, "-std=c++17", "-Wall", "-Werror", str(tmp_path / "print.cc"), "-o", str(binary)], check=True
    )
    lines = subprocess.run([str(binary)], capture_output=True, text=True, check=True).stdout.splitlines()
    return {name: float(value) for name, value in map(str.split, lines)}


def test_header_compiles_to_the_same_numbers(tmp_path):
    constants = _compiled_constants(tmp_path)
    for prefix, rows in (("kCount", table.COUNTS), ("kSum", table.SUMS), ("kMax", table.MAXIMA)):
        assert constants[f"{prefix}Size"] == len(rows)
        for index, name in enumerate(rows):
            assert constants[prefix + name.title().replace("_", "")] == index
    assert constants["kStateVersion"] == table.STATE_VERSION
    assert constants["kAbsBits"] == table.ABS_BITS
    assert constants["kInfBits"] == table.INF_BITS
    assert constants["kNearBits"] == table.NEAR_BITS
    assert constants["kLog2E"] == table.LOG2E == math.log2(math.e)
