"""MLflow: metrics of a run (extra ``pyrlstats[mlflow]``)."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from pyrlstats.results import Statistics
from pyrlstats.sinks.clients import client

_MOST_METRICS = 1000  # of one request
_REFUSED = re.compile(r"[^\w./: -]", re.ASCII)


class MLflowSink:
    """Logs scalars as metrics, in batches and beside training: a request of one step is waited for at the next.

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
        self._pending: list[Any] = []

    def write(self, step: int, stats: Mapping[str, Statistics[Any]], scalars: Mapping[str, float]) -> None:
        """Queue one step.

        Raises:
            ValueError: two keys that MLflow cannot tell apart; nothing is queued.
            MlflowException: the step before could not be logged; this one is queued.
        """
        now = int(time.time() * 1000)
        names = {key: _REFUSED.sub("_", key) for key in scalars}
        if len(set(names.values())) < len(names):
            twice = sorted(key for key in names if list(names.values()).count(names[key]) > 1)
            raise ValueError(f"MLflow has the same name for {twice}: rename the slices")
        metrics = [self._metric(names[key], float(value), now, step) for key, value in scalars.items()]
        before, self._pending = self._pending, []
        for start in range(0, len(metrics), _MOST_METRICS):
            batch = metrics[start : start + _MOST_METRICS]
            self._pending.append(self._client.log_batch(self._run_id, metrics=batch, synchronous=False))
        for operation in before:
            operation.wait()

    def close(self) -> None:
        """Wait for the last step. The run is the caller's to end.

        Raises:
            MlflowException: it could not be logged.
        """
        pending, self._pending = self._pending, []
        for operation in pending:
            operation.wait()
