"""pytest-benchmark over the registry: every contender of the main cases, and its result.

``pytest benchmarks/test_registry.py --benchmark-enable`` times; without, each runs once as a test.
"""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
from pyrlstats.benchmarks import gate
from pyrlstats.benchmarks.contenders import ALL
from pyrlstats.benchmarks.exact import Exact, exact
from pyrlstats.benchmarks.inputs import Inputs, pool
from pyrlstats.benchmarks.registry import Case, cases

TOKENS = 1 << 16
MAIN = {
    case.name.split(",")[0]: dataclasses.replace(case, tokens=min(case.tokens, TOKENS))
    for case in cases("cpu", quick=True)
    if case.axis in ("statistics", "quantiles", "streaming")
}

pytestmark = pytest.mark.filterwarnings("ignore")  # of contenders


@cache
def prepared(name: str) -> tuple[Inputs, Exact]:
    case = MAIN[name]
    inputs = next(pool(case.spec, case.tokens, "cpu").cut(case.tokens, min(case.micro_batches, 4)))
    return inputs, exact(inputs)


def pairs() -> list[object]:
    found = []
    for name, case in MAIN.items():
        for contender in case.contenders:
            marks = pytest.mark.benchmark(group=name)
            found.append(pytest.param(name, case, contender, marks=marks, id=f"{name}-{contender}"))
    return found


@pytest.mark.parametrize(("name", "case", "contender"), pairs())
def test_contender(benchmark, name: str, case: Case, contender: str) -> None:
    inputs, answer = prepared(name)
    chosen = ALL[contender]
    reason = chosen.reason_to_skip(inputs)
    if reason is not None:
        pytest.skip(reason)
    if "compile" in contender and benchmark.disabled:
        pytest.skip("compiles for half a minute: only with --benchmark-enable")
    launch, collect = chosen.make(inputs)
    results = collect(launch(inputs))
    violation = gate.check(results, answer, chosen.tolerance)
    if chosen.family != "ours" and violation is not None:
        pytest.skip(f"wrong, so it gets no time: {violation}")
    assert violation is None
    assert results.keys() >= {"abs_log_ratio_p99_9"} or chosen.family != "ours"
    benchmark(lambda: collect(launch(inputs)))
