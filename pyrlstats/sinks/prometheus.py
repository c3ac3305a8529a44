"""Prometheus: an exporter with gauges and histograms (extra ``pyrlstats[prometheus]``)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyrlstats.layout import Layout
from pyrlstats.results import Statistics
from pyrlstats.sinks.clients import client
from pyrlstats.sinks.labels import labelled


class PrometheusSink:
    """Exposes the latest step as gauges, and all steps so far as classic histograms of abs(x).

    ``pyrlstats_rl_ess_fraction{run="...",slice="post_tool"}`` and the like; NaN and infinity are exposed as they are.
    ``pyrlstats_rl_abs_log_ratio`` (``abs_value`` of values) is a histogram: counters that grow by every step, so that
    ``histogram_quantile(0.99, rate(..._bucket[10m]))`` is right; its buckets are octaves. x is a float32 and our
    bins include their lower edges, so ``le`` is the largest float32 below a power of two: each count is exact. Native
    histograms are not what this client can expose to a server, and x itself cannot be a counter: its sum falls.

    Args:
        run: value of the label ``run``.
        port: serve ``/metrics`` there; None serves nothing, for a process that exposes ``registry`` already.
        addr: address to serve on.
        registry: a ``CollectorRegistry``; None is the client's own.
        octaves: exponents of 2 of the lowest and the highest finite bucket.
        namespace: put before every name.

    Raises:
        ImportError: prometheus_client is missing.
        ValueError: octaves that do not ascend.
        OSError: the port is taken.
    """

    def __init__(
        self,
        run: str,
        port: int | None = None,
        *,
        addr: str = "0.0.0.0",
        registry: Any = None,
        octaves: tuple[int, int] = (-14, 6),
        namespace: str = "pyrlstats",
    ) -> None:
        self._client = client("prometheus_client", "prometheus")
        self._core = client("prometheus_client.core", "prometheus")
        if octaves[0] >= octaves[1]:
            raise ValueError(f"octaves must be (lowest, highest) exponents of 2, got {octaves}")
        self._run = run
        self._octaves = octaves
        self._namespace = namespace
        self._totals: dict[tuple[str, str, Layout], _Total] = {}
        # replaced as a whole: a scrape, in its own thread, sees one step or the next
        self._families: list[Any] = []
        self._registry = self._client.REGISTRY if registry is None else registry
        self._server: Any = None
        if port is not None:
            self._server, self._thread = self._client.start_http_server(port, addr, self._registry)
        self._registered = False
        self._register()

    @property
    def port(self) -> int | None:
        """Where it is served: the one that was free, if 0 was asked for."""
        return None if self._server is None else int(self._server.server_port)

    def collect(self) -> Iterable[Any]:
        """The families of the latest step, for the registry."""
        return self._families

    def write(self, step: int, stats: Mapping[str, Statistics[Any]], scalars: Mapping[str, float]) -> None:
        """Replace the gauges, and add one step to the histograms.

        Raises:
            ValueError: two keys that have the same name in Prometheus; what is exposed stays.
        """
        gauges: dict[str, dict[str | None, float]] = {}
        for key, name, value in labelled(stats, scalars):
            values = gauges.setdefault(self._name(key), {})
            if name in values:
                raise ValueError(f"Prometheus has the same name for {key!r} and another scalar: rename one")
            values[name] = value
        histograms = {self._name(f"{prefix}abs_{one.kind}"): one for prefix, one in stats.items()}
        clash = gauges.keys() & histograms.keys()
        if clash or len(histograms) < len(stats):
            raise ValueError(f"Prometheus has the same name for two of these: change the prefixes {list(stats)}")
        families = [self._gauge(name, values) for name, values in gauges.items()]
        families += [self._histogram(name, one) for name, one in histograms.items()]
        self._families = families
        self._register()

    def _gauge(self, name: str, values: Mapping[str | None, float]) -> Any:
        family = self._core.GaugeMetricFamily(name, "of the latest step", labels=["run", "slice"])
        for slice_name, value in values.items():
            family.add_metric([self._run] if slice_name is None else [self._run, slice_name], value)
        return family

    def _histogram(self, name: str, stats: Statistics[Any]) -> Any:
        family = self._core.HistogramMetricFamily(name, "of abs(x) over all steps", labels=["run", "slice"])
        layout = stats.state.layout
        for row, slice_name in enumerate(stats):
            total = self._totals.setdefault((name, slice_name, layout), _Total(layout, self._octaves))
            total.add(stats, row)
            family.add_metric([self._run, slice_name], total.buckets(self._client.utils.floatToGoString), total.sum)
        return family

    def _name(self, key: str) -> str:
        return re.sub(r"\W", "_", f"{self._namespace}_{key}", flags=re.ASCII)

    def _register(self) -> None:
        if not self._registered:
            self._registry.register(self)
            self._registered = True

    def close(self) -> None:
        """Stop serving and leave the registry."""
        if self._registered:
            self._registry.unregister(self)
            self._registered = False
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None


class _Total:
    """Counts of abs(x) of one slice over all steps, at powers of two that are edges of bins."""

    def __init__(self, layout: Layout, octaves: tuple[int, int]) -> None:
        lowest, highest = max(octaves[0], layout.min_exp + 1), min(octaves[1], layout.max_exp - 1)
        exponents = np.arange(lowest, highest + 1)
        self._ends = (exponents - layout.min_exp) << layout.mantissa_bits
        self._limits = np.nextafter(np.ldexp(np.float32(1.0), exponents), np.float32(0.0))
        self._counts: NDArray[np.int64] = np.zeros(len(exponents) + 2, np.int64)
        self.sum = 0.0

    def add(self, stats: Statistics[Any], row: int) -> None:
        state = stats.state
        positive = state.layout.bins_per_sign
        magnitudes = state.histogram[row, positive:] + state.histogram[row, :positive][::-1]
        below = np.concatenate(([0], np.cumsum(magnitudes)))
        zeros = state.count("n_zero")[row]
        self._counts += np.concatenate(([zeros], zeros + below[self._ends], [zeros + below[-1]]))
        self.sum += float(state.sum("abs_x")[row])

    def buckets(self, text: Any) -> list[tuple[str, float]]:
        """(le, cumulative count), the zeros first."""
        limits = [0.0, *self._limits.tolist(), float("inf")]
        return [(text(limit), float(count)) for limit, count in zip(limits, self._counts, strict=True)]
