"""Slices, values and comparisons on tensors never ask the host for a value: on a GPU that would be a sync."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import pyrlstats
from pyrlstats import compare, intervals, slices, values

# operators that wait for a device, or whose result has a size that depends on data
FORBIDDEN = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "bincount",
    "_unique2",
    "unique_dim",
    "equal",
    "is_nonzero",
    "repeat_interleave.Tensor",
)


class NoSync(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function).removeprefix("aten.")
        assert not name.startswith(tuple(f"{one}." if "." not in one else one for one in FORBIDDEN)), name
        if name.startswith("index.Tensor"):
            assert all(one is None or one.dtype != torch.bool for one in args[1]), "boolean indexing"
        return function(*args, **(kwargs or {}))


def test_the_check_finds_a_sync() -> None:
    for sync in (lambda x: x.sum().item(), lambda x: x[x > 0], lambda x: bool(x.any()), lambda x: x.bincount()):
        with pytest.raises(AssertionError), NoSync():
            sync(torch.arange(3))


MODEL = torch.tensor([[1, 1, 0, 1, 1, 0], [0, 1, 1, 1, 0, 0]])
CU = torch.tensor([0, 3, 3, 6])
SEQUENCE = torch.tensor([3, 2, 1])

CASES: dict[str, Callable[[], Any]] = {
    "tool": lambda: slices.tool_slices(MODEL),
    "tool mask": lambda: slices.tool_slices(MODEL, MODEL == 0),
    "tool packed": lambda: slices.tool_slices(MODEL[0], cu_seqlens=CU),
    "tool positions": lambda: slices.tool_slices(MODEL, position_ids=MODEL),
    "call": lambda: slices.tool_call_slices(MODEL),
    "turn": lambda: slices.turn_slices(MODEL, response_mask=MODEL),
    "position": lambda: slices.position_slices(MODEL, first=1, last=1),
    "staleness": lambda: slices.staleness_slices(torch.tensor(4), SEQUENCE, cu_seqlens=CU, n_tokens=6),
    "sign": lambda: slices.advantage_sign_slices(SEQUENCE.float(), cu_seqlens=CU, n_tokens=6),
    "group": lambda: slices.group_slices(SEQUENCE, {"a": 3, "b": 1}, other="rest"),
    "product": lambda: (slices.tool_slices(MODEL) & slices.turn_slices(MODEL)) & MODEL,
    "explained variance": lambda: values.explained_variance(MODEL, 2 * MODEL, {"a": MODEL}).explained_variance,
    "groups by id": lambda: values.group_reward_stats(SEQUENCE, CU[1:]) + values.group_reward_stats(SEQUENCE, CU[:3]),
    "groups by shape": lambda: values.group_reward_stats(MODEL).between_group_std,
}


@pytest.mark.parametrize("case", CASES)
def test_slices_and_values(case: str) -> None:
    with NoSync():
        CASES[case]()


def test_statistics_of_values_and_comparisons() -> None:
    x = torch.linspace(-1, 1, 50)
    one = values.value_stats(x, {"a": x > 0, "b": x < 0.5})
    two = values.value_stats(2 * x, {"a": x > 0, "b": x < 0.5})
    pair = compare.compare(one, two)
    with NoSync():
        slices.pool(one, {"both": ["a", "b"]})
        view = (one + two)["a"]
        for name in values.stats.SCALARS:
            getattr(view, name)
        for slice_ in pair.values():
            slice_.quantile_shift([0.1, 0.9])
            slice_.log_quantile_shift(0.9)
            slice_.tail_ratio()
            slice_.tail_ratio(threshold=0.25)
            slice_.wasserstein1()
            slice_.kolmogorov_smirnov()
            slice_.jensen_shannon()
        compare.ks_noise_floor(one["a"], two["b"])
        intervals.quantile_interval(one, [0.5, 0.999])
        intervals.abs_quantile_interval(one["a"], 0.5)


def test_the_engine_behind_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYRLSTATS_BACKEND", "torch")
    accumulator = values.ValueAccumulator(["a"], device="cpu")
    with NoSync():
        accumulator.update(torch.ones(5), {"a": torch.ones(5)}).compute()
        pyrlstats.slice_stats(torch.ones(6), torch.ones(6), slice_ids=MODEL[0], names=["a", "b"])
