"""``update`` inside ``torch.compile(fullgraph=True)``, and the operator behind it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from pyrlstats import Layout, SliceAccumulator, _ops
from pyrlstats.state import State

NAMES = ("all", "some")
COUNTED = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # of the compilers


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def accumulator() -> SliceAccumulator:
    return SliceAccumulator(NAMES, device="cpu")


def tokens(n: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    rng = torch.Generator().manual_seed(n)
    logp = torch.randn(n, 3, generator=rng).to(dtype).requires_grad_()
    old_logp = torch.zeros(n, 3, dtype=dtype)
    return logp, old_logp, {"some": torch.rand(n, 1, generator=rng) < 0.3, "all": torch.ones(3)}


def same(got: SliceAccumulator, wanted: SliceAccumulator) -> bool:
    assert got._state is not None
    assert wanted._state is not None
    return torch.equal(got._state.buffer, wanted._state.buffer)


@COUNTED
@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_step_counts_the_same(backend: str) -> None:
    compiled, eager = accumulator(), accumulator()

    @torch.compile(fullgraph=True, backend=backend)
    def step(logp: torch.Tensor, old_logp: torch.Tensor, masks: dict[str, torch.Tensor]) -> torch.Tensor:
        logp = logp * 1.0
        compiled.update(logp, old_logp, masks)
        return (logp.exp() - old_logp).sum()

    for n in (20, 20, 33, 47):  # the last ones with dynamic shapes
        logp, old_logp, masks = tokens(n)
        loss = step(logp, old_logp, masks)
        loss.backward()
        torch.testing.assert_close(logp.grad, logp.detach().exp())
        eager.update(logp, old_logp, masks)
        assert same(compiled, eager)
    compiled.reset()
    step(*tokens(20))
    eager.reset().update(*tokens(20))
    assert same(compiled, eager)


@COUNTED
@pytest.mark.parametrize(
    "call",
    [
        lambda acc, logp, old, masks: acc.update(logp, old, [masks["all"], masks["some"]]),
        lambda acc, logp, old, masks: acc.update(logp, old, masks, mask=masks["some"]),
        lambda acc, logp, old, masks: acc.update(logp, old, slice_ids=(logp > 0).long(), mask=masks["some"]),
        lambda acc, logp, old, masks: acc.update(logp.to(torch.bfloat16), old, masks),
        lambda acc, logp, old, masks: acc.update(
            logp[:, 1:], old[:, :-1], masks["some"].expand(-1, 2)[None].unbind() * 2
        ),
    ],
)
def test_every_kind_of_arguments(call: Any) -> None:
    compiled, eager = accumulator(), accumulator()
    arguments = tokens(20)
    torch.compile(call, fullgraph=True, backend="aot_eager")(compiled, *arguments)
    call(eager, *arguments)
    assert same(compiled, eager)
    assert eager.compute()["all"].n_tokens > 0


@COUNTED
def test_one_slice() -> None:
    compiled = SliceAccumulator(["all"], device="cpu")
    logp, old_logp, masks = tokens(20)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(logp: torch.Tensor, old_logp: torch.Tensor, mask: torch.Tensor) -> None:
        compiled.update(logp, old_logp)
        compiled.update(logp, old_logp, mask)

    step(logp, old_logp, masks["some"])
    assert compiled.compute()["all"].n_tokens == 60 + 3 * int(masks["some"].sum())


@COUNTED
def test_errors_count_nothing() -> None:
    made, homeless = accumulator(), SliceAccumulator(NAMES)
    logp, old_logp, masks = tokens(20)

    def compiled(call: Any) -> Any:
        return torch.compile(call, fullgraph=True, backend="aot_eager")

    for given, message in (
        ({"all": masks["all"]}, r"masks must hold exactly the slices \['all', 'some'\]: missing \['some'\]"),
        ([masks["all"]], "got 1 masks and 2 names"),
        (masks["all"], "got a single array"),
    ):
        with pytest.raises(Exception, match=message):
            compiled(lambda given=given: made.update(logp, old_logp, given))()
    with pytest.raises(ValueError, match=r"mask of slice 'some' must broadcast to logp's shape \(20, 3\), got \(7,\)"):
        compiled(lambda: made.update(logp, old_logp, {**masks, "some": torch.ones(7)}))()
    with pytest.raises(Exception, match=r"SliceAccumulator\(names, device=...\)"):
        compiled(lambda: homeless.update(logp, old_logp, masks))()
    with pytest.raises(ValueError, match="old_logp must have logp's shape"):
        compiled(lambda: made.update(logp, old_logp[:3], masks))()
    assert made.compute()["all"].n_tokens == 0
    made._reduced = True
    with pytest.raises(Exception, match=r"call reset\(\) first"):
        compiled(lambda: made.update(logp, old_logp, masks))()


def operator_arguments(logp: torch.Tensor, old_logp: torch.Tensor, **given: Any) -> tuple[Any, ...]:
    state = State.empty(NAMES, Layout(), (0.2, 0.2), "cpu")
    return (
        *(logp, old_logp, given.get("masks"), given.get("slice_ids"), given.get("mask"), state.buffer),
        *(list(NAMES), [0.2, 0.2], [5, -24, 8]),
    )


@pytest.mark.parametrize("kind", ["masks", "slice_ids", "mask"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_opcheck(kind: str, dtype: torch.dtype) -> None:
    logp, old_logp, masks = tokens(20, dtype)
    both = [masks["all"], masks["some"]]
    given = {
        "masks": {"masks": both},
        "slice_ids": {"slice_ids": (logp > 0).long()},
        "mask": {"masks": both, "mask": masks["some"]},
    }[kind]
    assert _ops.accumulate is not None
    torch.library.opcheck(torch.ops.pyrlstats.accumulate_.default, operator_arguments(logp, old_logp, **given))


def test_fake_tensors() -> None:
    """On fakes the operator does nothing and needs nothing."""
    real = operator_arguments(torch.zeros(20, 3, requires_grad=True), torch.zeros(20, 3), masks=[torch.ones(3)] * 2)
    with FakeTensorMode() as mode:
        arguments = pytree.tree_map_only(torch.Tensor, mode.from_tensor, real)
        assert torch.ops.pyrlstats.accumulate_(*arguments) is None


def test_no_graph_is_kept() -> None:
    made = accumulator()
    logp, old_logp, masks = tokens(20)
    made.update(logp, old_logp.requires_grad_(), masks)
    assert made._state is not None
    assert not made._state.buffer.requires_grad
    assert not made.compute()["all"].ess_fraction.requires_grad
