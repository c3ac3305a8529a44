"""Slices, values and comparisons on tensors never ask the host for a value: on a GPU that would be a sync."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from gpu_sync import no_sync
from torch.utils._python_dispatch import TorchDispatchMode

import pyrlstats
from pyrlstats import compare, exact_quantiles, intervals, slices, tails, values
from pyrlstats.backends import flat
from pyrlstats.integrations import _pairs, openrlhf, prime_rl, slime

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
    def __init__(self) -> None:
        super().__init__()
        self._from_host: list[torch.Tensor] = []  # Python numbers made into tensors

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function).removeprefix("aten.")
        if name.startswith("lift_fresh"):
            self._from_host.append(args[0])
            return args[0]
        if name.startswith(("copy_", "index_put")):  # x[0] = 1.0 and x[index] = 1.0: use fill_ and index_fill_
            value = args[1] if name.startswith("copy_") else args[2]
            assert not any(value is number for number in self._from_host), "a number from the host"
        assert not name.startswith(tuple(f"{one}." if "." not in one else one for one in FORBIDDEN)), name
        if name.startswith("index.Tensor"):
            assert all(one is None or one.dtype != torch.bool for one in args[1]), "boolean indexing"
        return function(*args, **(kwargs or {}))


def test_the_check_finds_a_sync() -> None:
    for sync in (
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: bool(x.any()),
        lambda x: x.bincount(),
        lambda x: operator.setitem(x, 0, 1),
        lambda x: operator.setitem(x, x, 1),
    ):
        with pytest.raises(AssertionError), NoSync():
            sync(torch.arange(3))


class Tokens:
    """Small inputs on one device."""

    def __init__(self, device: str) -> None:
        self.model = torch.tensor([[1, 1, 0, 1, 1, 0], [0, 1, 1, 1, 0, 0]], device=device)
        self.cu = torch.tensor([0, 3, 3, 6], device=device)
        self.sequence = torch.tensor([3, 2, 1], device=device)
        self.version = torch.tensor(4, device=device)
        self.x = torch.linspace(-1, 1, 50, device=device)
        self.masks = {"a": self.x > 0, "b": self.x < 0.5}


OPTIONAL: dict[str, Any] = {"sequences": True, "entropy": True, "probabilities": True}
CASES: dict[str, Callable[[Tokens], Any]] = {
    "tool": lambda t: slices.tool_slices(t.model),
    "tool mask": lambda t: slices.tool_slices(t.model, t.model == 0),
    "tool packed": lambda t: slices.tool_slices(t.model[0], cu_seqlens=t.cu),
    "tool list": lambda t: slices.tool_slices(t.model[0], t.model[1], cu_seqlens=[0, 3, 6]),
    "tool positions": lambda t: slices.tool_slices(t.model, position_ids=t.model),
    "call": lambda t: slices.tool_call_slices(t.model),
    "turn": lambda t: slices.turn_slices(t.model, response_mask=t.model),
    "position": lambda t: slices.position_slices(t.model, first=1, last=1),
    "staleness": lambda t: slices.staleness_slices(t.version, t.sequence, cu_seqlens=t.cu, n_tokens=6),
    "sign": lambda t: slices.advantage_sign_slices(t.sequence.float(), cu_seqlens=t.cu, n_tokens=6),
    "group": lambda t: slices.group_slices(t.sequence, {"a": 3, "b": 1}, other="rest"),
    "product": lambda t: (slices.tool_slices(t.model) & slices.turn_slices(t.model)) & t.model,
    "explained variance": lambda t: values.explained_variance(t.x, t.x**2, t.masks).explained_variance,
    "groups by id": lambda t: (
        values.group_reward_stats(t.sequence, t.cu[1:]) + values.group_reward_stats(t.sequence, t.cu[:3])
    ),
    "optional statistics": lambda t: pyrlstats.slice_stats(
        t.x[:48].view(4, 12), t.x[1:49].view(4, 12), advantages=t.x[:4], truncate=(0.5, 2.0), **OPTIONAL
    ),
    "optional statistics, packed": lambda t: pyrlstats.slice_stats(t.x, t.x, t.masks, cu_seqlens=t.cu, **OPTIONAL),
    "groups by shape": lambda t: values.group_reward_stats(t.model).between_group_std,
}


def all_statistics(one: values.ValueStats, two: values.ValueStats) -> None:
    slices.pool(one, {"both": ["a", "b"]})
    view = (one + two)["a"]
    for name in values.stats.SCALARS:
        getattr(view, name)
    for slice_ in compare.compare(one, two).values():
        slice_.quantile_shift([0.1, 0.9])
        slice_.abs_log_quantile_shift(0.9)
        slice_.tail_ratio()
        slice_.tail_ratio(threshold=0.25)
        slice_.wasserstein1()
        slice_.kolmogorov_smirnov()
        slice_.jensen_shannon()
        slice_.ks_noise_floor()
    compare.ks_noise_floor(one["a"], two["b"])
    intervals.quantile_interval(one, [0.5, 0.999])
    intervals.abs_quantile_interval(one["a"], 0.5)


@pytest.mark.parametrize("case", CASES)
def test_slices_and_values(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYRLSTATS_BACKEND", "torch")
    tokens = Tokens("cpu")
    with NoSync():
        CASES[case](tokens)


def test_statistics_of_values_and_comparisons() -> None:
    tokens = Tokens("cpu")
    one, two = (values.value_stats(x, tokens.masks) for x in (tokens.x, 2 * tokens.x))
    with NoSync():
        all_statistics(one, two)


def test_the_engine_behind_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYRLSTATS_BACKEND", "torch")
    tokens = Tokens("cpu")
    accumulator = values.ValueAccumulator(["a", "b"], device="cpu")
    with NoSync():
        accumulator.update(tokens.x, tokens.masks).compute()
        pyrlstats.slice_stats(tokens.x[:6], tokens.x[:6], slice_ids=tokens.model[0], names=["a", "b"])


def tokens_themselves(t: Tokens) -> dict[str, Any]:
    """What takes a second pass."""
    zeros, q = torch.zeros_like(t.x), [0.1, 0.5, 1.0]
    stats = pyrlstats.slice_stats(t.x, zeros, t.masks)
    shape = tails.tail_shape(t.x, zeros, t.masks) + tails.tail_shape(t.x**3, zeros, t.masks, capacity=11)
    packed = t.model[0].float()
    return {
        "quantiles": exact_quantiles(t.x, zeros, t.masks, q, stats=stats),
        "magnitudes": exact_quantiles(t.x, zeros, t.masks, q, absolute=True),
        "values": values.exact_quantiles(t.sequence, None, q),
        "k": {name: view.pareto_k for name, view in shape.items()},
        "hill": {name: view.hill_se for name, view in shape.items()},
        "top": {name: top.index for name, top in tails.top_tokens(t.x, zeros, t.masks, 7).items()},
        "places": {
            name: torch.stack((top.sequence, top.position))
            for name, top in tails.top_tokens(packed, 0 * packed, None, 9, cu_seqlens=t.cu).items()
        },
    }


def test_second_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYRLSTATS_BACKEND", "torch")
    tokens = Tokens("cpu")
    wanted = tokens_themselves(tokens)
    monkeypatch.setattr(flat, "in_host_memory", lambda _: False)
    with NoSync():
        found = tokens_themselves(tokens)
    torch.testing.assert_close(found, wanted, equal_nan=True)


@contextmanager
def the_gpus_own_backend() -> Iterator[None]:
    """Also where PYRLSTATS_BACKEND says what a machine without the extension shall do on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYRLSTATS_BACKEND", raising=False)
        yield


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")
def test_second_passes_on_a_gpu() -> None:
    tokens = Tokens("cuda")
    with the_gpus_own_backend(), no_sync():
        found = tokens_themselves(tokens)
    for name, wanted in tokens_themselves(Tokens("cpu")).items():
        got = {key: value.cpu() for key, value in found[name].items()}
        torch.testing.assert_close(got, wanted, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")
def test_a_gpu_never_waits_and_agrees_with_the_cpu() -> None:
    tokens, host = Tokens("cuda"), Tokens("cpu")
    with the_gpus_own_backend(), no_sync():
        found = {name: case(tokens) for name, case in CASES.items()}
        one, two = (values.value_stats(x, tokens.masks) for x in (tokens.x, 2 * tokens.x))
        all_statistics(one, two)
        change = compare.compare(one, two)
    for name, got in found.items():
        want = CASES[name](host)
        if isinstance(got, slices.Slices):
            assert got.ids.tolist() == want.ids.tolist(), name
        elif isinstance(got, torch.Tensor):
            torch.testing.assert_close(got.cpu(), want, equal_nan=True)
        else:
            # abs: spreads of x that are all rounding
            assert got.to_dict() == pytest.approx(want.to_dict(), nan_ok=True, abs=1e-7), name
    one, two = (values.value_stats(x, host.masks) for x in (host.x, 2 * host.x))
    assert change.to_dict() == pytest.approx(compare.compare(one, two).to_dict(), rel=1e-6, nan_ok=True)


def test_what_trainers_call_in_every_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYRLSTATS_BACKEND", "torch")
    t = Tokens("cpu")
    new, old, mask = t.x[:12].view(2, 6), t.x[12:24].view(2, 6), t.model
    hooks: dict[Any, Callable[[_pairs.PairAccumulator], None]] = {
        openrlhf.PAIRS: lambda acc: openrlhf._count(acc, new, old, old, action_mask=mask, rollout_log_probs=old),
        slime.PAIRS: lambda acc: slime.count(acc, list(new), list(old), list(mask)),
        prime_rl.PAIRS: lambda acc: prime_rl.count(
            acc, trainer_logprobs=new, inference_logprobs=old, loss_mask=mask, rl_weights=mask, ref_kl_weights=mask
        ),
    }
    for pairs, hook in hooks.items():
        accumulator = _pairs.PairAccumulator(pairs, device="cpu")
        with NoSync():
            hook(accumulator)
        assert int(accumulator.collect()[pairs[0]]["all"].n_tokens) == int(mask.sum())
