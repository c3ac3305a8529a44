"""MLflow: metrics of a run (extra ``pyrlstats[mlflow]``)."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from pyrlstats.results import Statistics
from pyrlstats.sinks.clients import client

_MOST_METRICS = 1000  # of one request
_MOST_PENDING = 100  # steps
_REFUSED = re.compile(r"[^\w./: -]", re.ASCII)


class MLflowSink:
    """Logs scalars as metrics, in batches, from a thread: a server that is slow or gone does not hold up training.

    What fails there is raised, to be counted, at the next write. A server that is 100 steps behind gets no more until
    it has caught up: those steps are counted as failures too. ``close`` waits.

    Characters that MLflow refuses in names become "_". NaN is kept; infinity is kept by MLflow's file store, while
    its databases replace it by the largest float64. MLflow has no histograms of this kind: log the files of a
    :class:`ParquetSink` as artifacts.

    Args:
        run_id: of a run; None is the active one.
        tracking_uri: None is MLflow's own setting.

    Raises:
        ImportError: mlflow is missing.
        RuntimeError: there is no run.
    """

    def __init__(self, run_id: str | None = None, tracking_uri: str | None = None) -> None:
        mlflow = client("mlflow", "mlflow")
        self._metric = client("mlflow.entities", "mlflow").Metric
        if run_id is None:
            run = mlflow.active_run()
            if run is None:
                raise RuntimeError("there is no MLflow run: call mlflow.start_run() first, or give run_id=")
            run_id = run.info.run_id
        self._run_id = run_id
        self._client = mlflow.MlflowClient(tracking_uri)
        self._worker = ThreadPoolExecutor(1, "pyrlstats-mlflow")
        self._pending: deque[Future[None]] = deque()

    def write(self, step: int, stats: Mapping[str, Statistics[Any]], scalars: Mapping[str, float]) -> None:
        """Queue one step.

        Raises:
            ValueError: two keys that MLflow cannot tell apart; nothing is queued.
            RuntimeError: the server is too far behind; nothing is queued.
            MlflowException: an earlier step could not be logged; this one is queued.
        """
        now = int(time.time() * 1000)
        names = {key: _REFUSED.sub("_", key) for key in scalars}
        if len(set(names.values())) < len(names):
            twice = sorted(key for key in names if list(names.values()).count(names[key]) > 1)
            raise ValueError(f"MLflow has the same name for {twice}: rename the slices")
        behind = sum(not future.done() for future in self._pending)
        if behind >= _MOST_PENDING:
            raise RuntimeError(f"MLflow is {behind} steps behind: step {step} is left out")
        metrics = [self._metric(names[key], float(value), now, step) for key, value in scalars.items()]
        self._pending.append(self._worker.submit(self._log, metrics))
        while self._pending[0].done() and len(self._pending) > 1:
            self._pending.popleft().result()

    def _log(self, metrics: list[Any]) -> None:
        for start in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + _MOST_METRICS])

    def close(self) -> None:
        """Wait for the steps under way. The run is the caller's to end.

        Raises:
            RuntimeError: steps could not be logged; how many.
        """
        errors = [error for error in (future.exception() for future in self._pending) if error is not None]
        self._pending.clear()
        if errors:
            raise RuntimeError(f"{len(errors)} of the last steps could not be logged") from errors[0]
