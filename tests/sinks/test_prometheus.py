"""A real scrape, read back by Prometheus' own parser of its text format."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pyrlstats import Layout, slice_stats
from pyrlstats.sinks import PrometheusSink, Sinks
from pyrlstats.values import value_stats

pytest.importorskip("prometheus_client")


@pytest.fixture
def registry() -> Any:
    from prometheus_client import CollectorRegistry

    return CollectorRegistry()


def scrape(port: int) -> dict[str, Any]:
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        text = response.read().decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_gauges_and_histograms(registry: Any, steps: Any, wanted: Callable[[str], Any]) -> None:
    sink = PrometheusSink("run 1", 0, addr="127.0.0.1", registry=registry)
    sinks = Sinks([sink])
    assert sink.port is not None
    assert scrape(sink.port) == {}
    for step, stats in steps:
        sinks.write(step, stats, {"loss": 0.5})
        families = scrape(sink.port)
        got = {}
        for family in families.values():
            if family.type == "gauge":
                for sample in family.samples:
                    assert sample.labels.pop("run") == "run 1"
                    prefix = f"rl/{sample.labels['slice']}/" if sample.labels else ""
                    got[prefix + sample.name.removeprefix("pyrlstats_rl_" if prefix else "pyrlstats_")] = sample.value
        numbers = {key: float(value) for key, value in wanted("rl/")[step].items()}
        numbers["rl_n_out_of_range"] = numbers.pop("rl/n_out_of_range")
        np.testing.assert_equal(got, numbers | {"loss": 0.5})
    assert not any(sinks.failures.values())

    family = families["pyrlstats_rl_abs_log_ratio"]
    assert family.type == "histogram"
    for name in ("all", "tail", "positive", "empty"):
        samples = [sample for sample in family.samples if sample.labels["slice"] == name]
        assert {sample.labels["run"] for sample in samples} == {"run 1"}
        total = sum(stats[name].n_finite for _, stats in steps)
        (count,) = (sample.value for sample in samples if sample.name.endswith("_count"))
        (sum_of_x,) = (sample.value for sample in samples if sample.name.endswith("_sum"))
        assert count == total
        means = [(stats[name].log_ratio_abs_mean, stats[name].n_finite) for _, stats in steps]
        assert sum_of_x == pytest.approx(sum(mean * n for mean, n in means if n), rel=1e-12)
        buckets = {float(s.labels["le"]): s.value for s in samples if s.name.endswith("_bucket")}
        assert buckets[0.0] == sum(stats[name].n_zero for _, stats in steps)
        assert buckets[np.inf] == total
        assert list(buckets) == sorted(buckets)
    sinks.close()
    assert registry.get_sample_value("pyrlstats_loss", {"run": "run 1"}) is None


def test_every_bucket_is_exact_also_on_its_edge(registry: Any) -> None:
    x = np.ldexp(np.float32(1), np.arange(-20, 10)).astype(np.float32)
    x = np.concatenate((x, -x, np.nextafter(x, np.float32(0)), np.zeros(3, np.float32)))
    for layout in (Layout(), Layout(0, -8, 0)):
        sink = PrometheusSink("a", registry=registry, namespace=f"m{layout.mantissa_bits}")
        for _ in range(2):
            sink.write(1, {"": slice_stats(x, np.zeros_like(x), layout=layout)}, {})
        buckets = {
            float(sample.labels["le"]): sample.value
            for family in sink.collect()
            for sample in family.samples
            if sample.name.endswith("_bucket")
        }
        assert len(buckets) == (23 if layout == Layout() else 9)
        for limit, count in buckets.items():
            assert count == 2 * np.count_nonzero(np.abs(x) <= limit)


def test_two_runs_several_quantities_and_names_that_clash(registry: Any) -> None:
    x = np.ones(3, np.float32)
    stats, values = slice_stats(x, np.zeros_like(x)), value_stats(x)
    one, other = (PrometheusSink(run, registry=registry, namespace=run) for run in ("a", "b"))
    for sink in (one, other):
        sink.write(1, {"rl/": stats, "reward/": values}, stats.to_dict("rl/") | values.to_dict("reward/"))
    assert registry.get_sample_value("a_reward_mean", {"run": "a", "slice": "all"}) == 1.0
    assert registry.get_sample_value("b_rl_n_tokens", {"run": "b", "slice": "all"}) == 3.0
    assert registry.get_sample_value("b_reward_abs_value_count", {"run": "b", "slice": "all"}) == 3.0
    with pytest.raises(ValueError, match="same name"):
        one.write(2, {}, {"a/b": 1.0, "a_b": 2.0})
    with pytest.raises(ValueError, match="same name"):
        one.write(2, {"a/": stats, "a_": stats}, {})
    assert registry.get_sample_value("a_reward_mean", {"run": "a", "slice": "all"}) == 1.0
    one.close()
    one.close()
    assert registry.get_sample_value("a_reward_mean", {"run": "a", "slice": "all"}) is None
    one.write(3, {}, {"loss": 4.0})
    assert registry.get_sample_value("a_loss", {"run": "a"}) == 4.0
    with pytest.raises(ValueError, match="octaves"):
        PrometheusSink("c", registry=registry, octaves=(3, 3))
