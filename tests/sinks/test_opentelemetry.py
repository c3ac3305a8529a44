"""Gauges, collected by the SDK's in-memory reader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pyrlstats.sinks import OpenTelemetrySink, Sinks

pytest.importorskip("opentelemetry.sdk")


def collect(reader: Any) -> dict[str, float]:
    data = reader.get_metrics_data()
    found = {}
    for resource in data.resource_metrics if data is not None else ():
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                for point in metric.data.data_points:
                    attributes = dict(point.attributes)
                    assert attributes.pop("run") == "run 1"
                    found[metric.name, attributes.get("slice")] = point.value
    return found


def test_gauges(steps: Any, wanted: Callable[[str], Any]) -> None:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader])
    sinks = Sinks([OpenTelemetrySink("run 1", provider.get_meter("test"))])
    for step, stats in steps:
        sinks.write(step, stats, {"loss": 0.5, "non-finite": np.inf, "1st >": 2})
        want: dict[Any, float] = {("loss", None): 0.5, ("x1st__", None): 2}
        for key, value in wanted("rl/")[step].items():
            if np.isfinite(value):
                _, name, statistic = key.split("/") if key.count("/") == 2 else ("", None, key.split("/")[1])
                want[f"rl.{statistic}", name] = value
        assert collect(reader) == want
    assert not any(sinks.failures.values())
    with pytest.raises(ValueError, match="same name"):
        OpenTelemetrySink("a", provider.get_meter("test")).write(1, {}, {"a/b": 1.0, "a.b": 2.0})
    sinks.close()
    assert collect(reader) == {}
    provider.shutdown()


def test_the_global_meter_is_the_default(steps: Any) -> None:
    sinks = Sinks([OpenTelemetrySink("run 1")])  # nothing is set up: the API's own no-op
    sinks.write(*steps[0])
    assert not any(sinks.failures.values())
