"""Where statistics go after a step: one protocol of two methods, a guard around it, a file for each client.

Importing this package imports no client: each sink imports its own when it is made.
"""

from pyrlstats.sinks.jsonl import JsonlSink, read_jsonl
from pyrlstats.sinks.mlflow import MLflowSink
from pyrlstats.sinks.opentelemetry import OpenTelemetrySink
from pyrlstats.sinks.parquet import ParquetSink
from pyrlstats.sinks.prometheus import PrometheusSink
from pyrlstats.sinks.protocol import Sink
from pyrlstats.sinks.sinks import Sinks
from pyrlstats.sinks.tensorboard import TensorBoardSink
from pyrlstats.sinks.trackio import TrackioSink
from pyrlstats.sinks.wandb import WandbSink

__all__ = [
    "JsonlSink",
    "MLflowSink",
    "OpenTelemetrySink",
    "ParquetSink",
    "PrometheusSink",
    "Sink",
    "Sinks",
    "TensorBoardSink",
    "TrackioSink",
    "WandbSink",
    "read_jsonl",
]
