"""OpenTelemetry metrics: gauges (extra ``pyrlstats[opentelemetry]``)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from pyrlstats.results import Statistics
from pyrlstats.sinks.clients import client
from pyrlstats.sinks.labels import labelled


class OpenTelemetrySink:
    """The latest step as observable gauges: ``rl.ess_fraction`` with the attributes ``slice`` and ``run``.

    The prefix ``"rl/"`` becomes ``"rl."``, other characters that OpenTelemetry refuses become "_". A value that is
    not finite has no data point at its step: the SDK refuses those. Its API takes no histogram that is already
    counted, so quantiles are gauges. When values are sent is up to the reader of your ``MeterProvider``.

    Args:
        run: value of the attribute ``run``.
        meter: None is that of the global ``MeterProvider``.

    Raises:
        ImportError: opentelemetry is missing.
    """

    def __init__(self, run: str, meter: Any = None) -> None:
        metrics = client("opentelemetry.metrics", "opentelemetry")
        self._observation = metrics.Observation
        self._meter = metrics.get_meter("pyrlstats") if meter is None else meter
        self._run = run
        self._instruments: set[str] = set()
        # replaced as a whole: the reader's thread sees one step or the next
        self._latest: dict[str, dict[str | None, float]] = {}

    def write(self, step: int, stats: Mapping[str, Statistics[Any]], scalars: Mapping[str, float]) -> None:
        """Replace what is observed.

        Raises:
            ValueError: two keys that have the same name in OpenTelemetry; what was observed stays.
        """
        latest: dict[str, dict[str | None, float]] = {}
        for key, name, value in labelled(stats, scalars):
            values = latest.setdefault(_instrument_name(key), {})
            if name in values:
                raise ValueError(f"OpenTelemetry has the same name for {key!r} and another scalar: rename one")
            values[name] = value
        self._latest = latest
        for instrument in latest.keys() - self._instruments:
            self._meter.create_observable_gauge(instrument, callbacks=[partial(self._observe, instrument)])
            self._instruments.add(instrument)

    def _observe(self, instrument: str, options: Any) -> Iterator[Any]:
        for name, value in self._latest.get(instrument, {}).items():
            if abs(value) < float("inf"):
                attributes = {"run": self._run} if name is None else {"run": self._run, "slice": name}
                yield self._observation(value, attributes)

    def close(self) -> None:
        """Observe nothing from now on; flushing is the ``MeterProvider``'s."""
        self._latest = {}


def _instrument_name(key: str) -> str:
    name = re.sub(r"[^\w.-]", "_", key.replace("/", "."), flags=re.ASCII)
    return name if name[:1].isalpha() else f"x{name}"
