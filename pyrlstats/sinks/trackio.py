"""trackio: scalars and histograms of a run (extra ``pyrlstats[trackio]``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyrlstats.results import Statistics
from pyrlstats.sinks.bars import bars_of
from pyrlstats.sinks.clients import client


class TrackioSink:
    """Logs scalars under their keys and the histogram of each slice as ``prefix + slice + "/log_ratio"``.

    NaN and infinity are kept. A histogram has at most 512 bars with exact counts. trackio writes from a thread of its
    own and swallows its own errors: only what it raises can be counted.

    Args:
        run: a ``trackio.Run``; None is the one that ``trackio.init()`` has made.
        histograms: whether to log them.

    Raises:
        ImportError: trackio is missing.
    """

    def __init__(self, run: Any = None, *, histograms: bool = True) -> None:
        trackio = client("trackio", "trackio")
        self._histogram = trackio.Histogram
        self._log = trackio.log if run is None else run.log
        self._histograms = histograms

    def write(self, step: int, stats: Mapping[str, Statistics[Any]], scalars: Mapping[str, float]) -> None:
        """Queue one step.

        Raises:
            RuntimeError: there is no run.
        """
        data: dict[str, Any] = dict(scalars)
        for prefix, one in stats.items() if self._histograms else ():
            for name in one:
                bars = bars_of(one, name)
                if bars is not None:
                    data[f"{prefix}{name}/{one.kind}"] = self._histogram(np_histogram=bars)
        self._log(data, step=step)

    def close(self) -> None:
        """Nothing: the run is the caller's to finish."""
