"""What does not fit is refused with argument, got, wanted and cure; what is merely odd is counted."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch

import pyrlstats
from pyrlstats import Layout, SliceAccumulator, _inputs, slice_stats

X = torch.zeros(4, 6)
ONES = torch.ones(4, 6)


def refused(error: type[Exception], parts: tuple[str, ...], *arguments: Any, **options: Any) -> None:
    """The call raises this very type, and its message holds every part; so does an accumulator's update."""
    with pytest.raises(error) as caught:
        slice_stats(*arguments, **options)
    assert type(caught.value) is error
    for part in parts:
        assert part in str(caught.value), str(caught.value)
    names = options.pop("names", None)
    masks = arguments[2] if len(arguments) > 2 else None
    if names is None:
        names = list(masks) if isinstance(masks, dict) else ["all"]
    if isinstance(names, list) and options.keys() <= {"slice_ids", "mask"}:
        accumulator = SliceAccumulator(names)
        with pytest.raises(error) as caught:
            accumulator.update(*arguments, **options)
        for part in parts:
            assert part in str(caught.value), str(caught.value)
        assert not np.asarray(accumulator.compute().state.counts).any()


# ---- shapes


@pytest.mark.parametrize("shape", [(4, 5), (6,), (24,), (1, 6), (4, 1), (4, 6, 1), ()])
@pytest.mark.parametrize("make", [torch.zeros, lambda shape: np.zeros(shape, np.float32)])
def test_shapes_differ(make, shape):
    """Also those that would broadcast: log-probabilities never do."""
    refused(ValueError, ("old_logp must have logp's shape (4, 6)", f"got {shape}"), make((4, 6)), make(shape))


@pytest.mark.parametrize("shape", [(4, 5), (5, 6), (3,), (4,), (4, 6, 1), (1, 4, 6), (0,)])
def test_a_mask_that_does_not_broadcast_names_its_slice(shape):
    parts = ("mask of slice 'post_tool'", "logp's shape (4, 6)", f"got {shape}")
    if shape == (4,):
        parts += ("one value a row is given as [:, None]",)
    for make in (torch.ones, np.ones):
        logp = torch.zeros(4, 6) if make is torch.ones else np.zeros((4, 6), np.float32)
        refused(ValueError, parts, logp, logp, {"pre_tool": make((4, 6)), "post_tool": make(shape)})


@pytest.mark.parametrize("shape", [(4, 5), (7,), (2, 4, 6)])
def test_other_arguments_that_do_not_broadcast(shape):
    refused(ValueError, ("mask must broadcast to logp's shape (4, 6)", f"got {shape}"), X, X, mask=torch.ones(shape))
    ids = torch.zeros(shape, dtype=torch.int64)
    refused(
        ValueError,
        ("slice_ids must broadcast to logp's shape (4, 6)", f"got {shape}"),
        X,
        X,
        slice_ids=ids,
        names=["a"],
    )


# ---- types and dtypes

ACCEPTED = ("float32", "bfloat16", "float16", "float64")


@pytest.mark.parametrize(
    "dtype",
    [
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.complex128,
        torch.float8_e4m3fn,
    ],
    ids=str,
)
def test_dtypes_of_tensors(dtype):
    wrong = torch.zeros(4, 6).to(dtype)
    name = str(dtype).removeprefix("torch.")
    refused(TypeError, ("logp must have one of the dtypes", *ACCEPTED, f"got {name}"), wrong, X)
    refused(TypeError, ("old_logp must have one of the dtypes", *ACCEPTED, f"got {name}"), X, wrong)


@pytest.mark.parametrize("dtype", ["int64", "uint8", "bool", "complex64", "longdouble", "object", "U3", "M8[s]", ">f4"])
def test_dtypes_of_arrays(dtype):
    """Also of the other byte order: nothing reads those bytes as they are."""
    wrong = np.zeros((4, 6), dtype)
    zeros = np.zeros((4, 6), np.float32)
    refused(TypeError, ("logp must have one of the dtypes", *ACCEPTED, "got "), wrong, zeros)
    refused(TypeError, ("old_logp must have one of the dtypes", *ACCEPTED, "got "), zeros, wrong)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e5m2], ids=str)
def test_dtypes_of_masks(dtype):
    mask = torch.zeros(4, 6).to(dtype)
    name = str(dtype).removeprefix("torch.")
    refused(TypeError, ("mask of slice 'a' must have one of the dtypes bool", f"got {name}"), X, X, {"a": mask})
    refused(TypeError, ("mask must have one of the dtypes bool", f"got {name}"), X, X, mask=mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.bfloat16], ids=str)
def test_dtypes_of_slice_ids(dtype):
    ids = torch.zeros(4, 6, dtype=dtype)
    name = str(dtype).removeprefix("torch.")
    refused(TypeError, ("slice_ids must have one of the dtypes int8", f"got {name}"), X, X, slice_ids=ids, names=["a"])


@pytest.mark.parametrize("value", [[0.0, 1.0], 1.5, None, "logp", (torch.zeros(2),)])
def test_things_that_are_no_arrays(value):
    kind = type(value).__name__
    refused(TypeError, ("logp must be a torch tensor, a NumPy array or a DLPack object", f"got {kind}"), value, X)
    cure = "torch.cat" if isinstance(value, tuple) else "torch.as_tensor"
    refused(TypeError, ("old_logp must be a torch tensor", f"got {kind}", cure), X, value)
    refused(TypeError, ("mask of slice 'a' must be a torch tensor", f"got {kind}"), X, X, {"a": value})


def test_a_list_of_tensors_and_token_ids_have_cures_of_their_own():
    refused(TypeError, ("got list: join them with torch.stack, or packed with torch.cat",), [X[0], X[1]], X)
    refused(TypeError, ("got int64: are these token ids?", "with .float()"), X.long(), X)
    zeros = np.zeros((4, 6), np.float32)
    refused(TypeError, ("got int32: are these token ids?", 'with .astype("float32")'), zeros, zeros.astype("int32"))


@pytest.mark.parametrize("masks", ["mask", 3, {1, 2}])
def test_masks_of_another_type(masks):
    with pytest.raises(TypeError, match=f"masks must be None, an array, a mapping .* got {type(masks).__name__}"):
        slice_stats(X, X, masks)


def test_a_sparse_tensor():
    refused(TypeError, ("logp must be a dense (strided) tensor", "to_dense()"), X.to_sparse(), X)
    refused(TypeError, ("mask of slice 'a' must be a dense (strided) tensor",), X, X, {"a": ONES.to_sparse()})


# ---- devices


def test_devices_differ():
    other = torch.zeros(4, 6, device="meta")
    refused(ValueError, ("old_logp must be on logp's device cpu", "got meta", ".to('cpu')"), X, other)
    refused(ValueError, ("mask of slice 'a' must be on logp's device cpu", "got meta"), X, X, {"a": other})
    refused(ValueError, ("mask must be on logp's device cpu", "got meta"), X, X, mask=other)
    refused(ValueError, ("slice_ids must be on", "got meta"), X, X, slice_ids=other.to(torch.int64), names=["a"])
    with pytest.raises(ValueError, match="got cpu"):
        slice_stats(other, np.zeros((4, 6), np.float32))


# ---- names


@pytest.mark.parametrize(
    ("names", "error", "part"),
    [
        (["a", "b", "a"], ValueError, "slice name 'a' is given twice"),
        (["a", ""], ValueError, "slice names must not be empty"),
        (["a", "b/c"], ValueError, "slice name 'b/c' must not contain '/'"),
        (["/"], ValueError, "must not contain '/'"),
        ([], ValueError, "at least one slice name"),
        (["a", 3], TypeError, "slice names must be strings, got 3 (int)"),
        ("ab", TypeError, "got the string 'ab': use ['ab']"),
    ],
)
def test_names(names, error, part):
    with pytest.raises(error, match=re.escape(part)):
        SliceAccumulator(names)
    with pytest.raises(error, match=re.escape(part)):
        slice_stats(X, X, [ONES] * max(len(names), 1), names=names)
    with pytest.raises(error, match=re.escape(part)):
        slice_stats(X, X, slice_ids=torch.zeros(4, 6, dtype=torch.int64), names=names)
    if isinstance(names, list) and len(set(names)) == len(names):
        with pytest.raises(error, match=re.escape(part)):
            slice_stats(X, X, dict.fromkeys(names, ONES))


def test_names_and_masks_that_do_not_fit():
    ids = torch.zeros(4, 6, dtype=torch.int64)
    for parts, masks, options in (
        (("a sequence of masks needs names=",), [ONES], {}),
        (("names= is for a sequence of masks",), {"a": ONES}, {"names": ["a"]}),
        (("masks and slice_ids exclude each other",), {"a": ONES}, {"slice_ids": ids}),
        (("slice_ids needs names=",), None, {"slice_ids": ids}),
        (("got 2 masks and 1 names",), [ONES, ONES], {"names": ["a"]}),
        (("masks are needed for the slices ['a', 'b']",), None, {"names": ["a", "b"]}),
        (("slices ['a', 'b'], got a single array",), ONES, {"names": ["a", "b"]}),
    ):
        with pytest.raises(ValueError) as caught:
            slice_stats(X, X, masks, **options)
        for part in parts:
            assert part in str(caught.value)
    with pytest.raises(ValueError, match="exclude each other"):
        SliceAccumulator(["a"]).update(X, X, {"a": ONES}, slice_ids=ids)


# ---- clip and layout


@pytest.mark.parametrize(
    ("clip", "part"),
    [
        ((0.0, 0.2), "clip low must satisfy 0 < low < 1, got 0.0"),
        ((1.0, 0.2), "clip low must satisfy 0 < low < 1, got 1.0"),
        ((-0.2, 0.2), "got -0.2"),
        ((math.nan, 0.2), "got nan"),
        ((0.2, 0.0), "clip high must be positive and finite, got 0.0"),
        ((0.2, -0.2), "got -0.2"),
        ((0.2, math.inf), "got inf"),
        ((0.2, math.nan), "got nan"),
        ((0.2,), "clip must be two numbers (low, high)"),
        ((0.1, 0.2, 0.3), "clip must be two numbers (low, high)"),
        (0.2, "clip must be two numbers (low, high), got 0.2"),
        (("a", "b"), "clip must be two numbers"),
        (None, "got None"),
    ],
)
def test_clip(clip, part):
    with pytest.raises(ValueError, match=re.escape(part)):
        slice_stats(X, X, clip=clip)
    with pytest.raises(ValueError, match=re.escape(part)):
        SliceAccumulator(["all"], clip=clip)


def test_a_bad_call_leaves_an_accumulator_as_it_was():
    accumulator = SliceAccumulator(["all"]).update(X, X)
    before = accumulator.compute().to_dict()
    for arguments in ((X, X[:3]), (X.int(), X), (X, X, torch.ones(5)), (X, X.to("meta"))):
        with pytest.raises((TypeError, ValueError)):
            accumulator.update(*arguments)
    np.testing.assert_equal(accumulator.compute().to_dict(), before)


# ---- odd, but valid


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (0, 0, 0)])
def test_no_tokens_at_all(shape):
    for logp in (torch.zeros(shape), np.zeros(shape, np.float32), torch.zeros(shape, dtype=torch.bfloat16)):
        for masks in (None, {"a": logp, "b": logp}):
            stats = slice_stats(logp, logp, masks)
            for view in stats.values():
                assert int(view.n_tokens) == int(view.n_finite) == 0
                assert math.isnan(view.ess_fraction)
                assert math.isnan(view.quantile(0.5))
                assert math.isnan(view.cdf(0.0))
            assert repr(stats)
            assert stats.to_dict()


def test_all_masks_empty():
    nan = torch.full((4, 6), math.nan)
    stats = slice_stats(nan, nan, {"a": torch.zeros(4, 6), "b": torch.zeros(6)}, mask=torch.ones(4, 1))
    for view in stats.values():
        assert int(view.n_tokens) == int(view.n_nan) == 0
        assert math.isnan(view.kl_k3)


def test_slice_ids_beyond_the_names_are_counted():
    big = torch.tensor([0, 1, 2, 7, 1 << 40, -1, -(1 << 40), 1])
    stats = slice_stats(torch.zeros(8), torch.zeros(8), slice_ids=big, names=["a", "b"])
    assert int(stats.n_out_of_range) == 3
    assert [int(view.n_tokens) for view in stats.values()] == [1, 2]
    assert stats.to_dict("x/")["x/n_out_of_range"] == 3


def test_odd_values_are_counted_as_what_they_are():
    inf, nan = math.inf, math.nan
    logp = torch.tensor([nan, inf, -inf, -inf, 0.0, -0.0, 1e-45, 0.0, 0.0, inf])
    old_logp = torch.tensor([0.0, 0.0, 0.0, -inf, 0.0, 0.0, 0.0, nan, -inf, inf])
    view = slice_stats(logp, old_logp)["all"]
    counts = {
        name: int(getattr(view, name)) for name in ("n_tokens", "n_finite", "n_nan", "n_pos_inf", "n_neg_inf", "n_zero")
    }
    assert counts == {"n_tokens": 10, "n_finite": 3, "n_nan": 4, "n_pos_inf": 2, "n_neg_inf": 1, "n_zero": 2}
    assert float(view.log_ratio_max) == float(np.float32(1e-45))
    assert float(view.zero_fraction) == 2 / 3


def test_merges_of_what_differs():
    base = slice_stats(X, X)
    for options, field in (
        ({"clip": (0.2, 0.21)}, "clip"),
        ({"layout": Layout(4)}, "layout"),
        ({"names": ["other"]}, "names"),
    ):
        other = slice_stats(ONES, X, **options)
        for left, right in ((base, other), (other, base)):
            kept = left.state.buffer.clone(), right.state.buffer.clone()
            with pytest.raises(
                ValueError, match=f"states with different {field} cannot be merged: .* make both with the same"
            ):
                left.merge(right)
            assert torch.equal(left.state.buffer, kept[0])
            assert torch.equal(right.state.buffer, kept[1])


def test_errors_do_not_hide_behind_python_optimisation():
    """No check of arguments is an assert."""
    import subprocess
    import sys

    code = (
        "import numpy as np, pyrlstats\n"
        "z = np.zeros(3, np.float32)\n"
        "for a in ((z, z[:2]), (z, z, {'a/b': z}), (z.astype(int), z)):\n"
        "    try: pyrlstats.slice_stats(*a)\n"
        "    except (TypeError, ValueError): print('refused')\n"
    )
    run = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["refused"] * 3


def test_unknown_backend_and_instruction_set(monkeypatch):
    monkeypatch.setenv("PYRLSTATS_BACKEND", "fast")
    with pytest.raises(ValueError, match=r"PYRLSTATS_BACKEND must be one of cpp, .* got 'fast'"):
        slice_stats(X, X)
    monkeypatch.setenv("PYRLSTATS_BACKEND", "cpp")
    if pyrlstats.build_info()["backends"]["cpp"] == "available":
        monkeypatch.setenv("PYRLSTATS_ISA", "mmx")
        with pytest.raises(ValueError, match=r'"mmx" is unknown or not usable on this machine; usable: .*portable'):
            slice_stats(X, X)


@pytest.mark.parametrize("layout", [None, (5, -24, 8), "fine"])
def test_layout_that_is_none(layout):
    with pytest.raises(TypeError, match=r"layout must be a pyrlstats\.Layout, got .*: use pyrlstats\.Layout"):
        pyrlstats.slice_stats(np.zeros(3, np.float32), np.zeros(3, np.float32), layout=layout)


@pytest.mark.parametrize("num_threads", [0, -1, 1.5, "a"])
def test_number_of_threads(num_threads):
    with pytest.raises(ValueError, match="num_threads must be a positive integer or None, got"):
        pyrlstats.slice_stats(np.zeros(3, np.float32), np.zeros(3, np.float32), num_threads=num_threads)


def test_array_subclasses():
    """A subclass is read as the plain array it holds; a masked array would hide a second mask."""

    class Named(np.ndarray):
        pass

    x = np.linspace(-1, 1, 9, dtype=np.float32)
    stats = pyrlstats.slice_stats(x.view(Named), np.zeros_like(x), x.view(Named) > 0)
    assert stats["all"].n_tokens == 4
    with pytest.raises(TypeError, match="logp must not be a masked array"):
        pyrlstats.slice_stats(np.ma.array(x, mask=x > 0), np.zeros_like(x))


def _bad_tensors() -> dict[str, tuple[Any, Any, Any, Any]]:
    x = torch.zeros(6)
    return {
        "no mask": (x, x, {"a": None, "b": x}, None),
        "shape": (x, x[:5], {"a": x, "b": x}, None),
        "integers": (x.int(), x, {"a": x, "b": x}, None),
        "complex mask": (x, x, {"a": x.to(torch.complex64), "b": x}, None),
        "sparse": (x, x, {"a": x.to_sparse(), "b": x}, None),
        "other device": (x, x, {"a": x, "b": x.to("meta")}, None),
        "base": (x, x, {"a": x, "b": x}, x.to(torch.complex64)),
        "missing": (x, x, {"a": x}, None),
    }


@pytest.mark.parametrize("bad", _bad_tensors())
def test_the_quick_look_at_tensors_lets_nothing_bad_through(bad: str) -> None:
    logp, old_logp, masks, base = _bad_tensors()[bad]
    assert _inputs._plain_batch(logp, old_logp, masks, None, base, ("a", "b")) is None
    with pytest.raises((TypeError, ValueError)):
        _inputs.gate(logp, old_logp, masks, None, base, ("a", "b"))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("base", [False, True])
def test_the_quick_look_at_tensors_gives_the_same_batch(grad: bool, base: bool, monkeypatch: Any) -> None:
    logp = torch.rand(2, 3, requires_grad=grad) * 2.0
    masks = {"a": logp > 0.5, "b": (logp > 1).to(torch.float64)}
    arguments = (logp, torch.rand(2, 3, dtype=torch.float64), masks, None, logp < 1.5 if base else None, ("a", "b"))
    quick = _inputs._plain_batch(*arguments)
    monkeypatch.setattr(_inputs, "_plain_batch", lambda *_: None)
    slow = _inputs.gate(*arguments)
    assert quick is not None
    for one, other in zip(vars(quick).values(), vars(slow).values(), strict=True):
        pairs = zip(one, other, strict=True) if isinstance(one, tuple) else [(one, other)]
        for mine, theirs in pairs:
            assert (mine is None and theirs is None) or mine.data_ptr() == theirs.data_ptr()
            assert mine is None or not mine.requires_grad
