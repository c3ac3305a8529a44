"""The whole run: ceilings, cases, the training step, the collectives, as one JSON document."""

from __future__ import annotations

import datetime
import json
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from . import collective, machine, training_step
from .registry import Case, cases
from .run import Ceilings, run_case
from .timing import in_words

SCHEMA = 1
TIME_LIMIT = {("cpu", True): 105.0, ("cpu", False): 1500.0, ("cuda", True): 100.0, ("cuda", False): 230.0}  # seconds

Document = dict[str, Any]
Watch = Callable[[str, int, int], None]  # what runs now, steps done, steps in all


def run(
    device: str,
    quick: bool = False,
    only: str = "",
    time_limit: float | None = None,
    watch: Watch = lambda *_: None,
    finished: Callable[[Document], None] = lambda _: None,
) -> Document:
    """Run every case whose name contains ``only``; what the time limit leaves no room for is listed as skipped.

    ``finished`` gets the document after every case, so that a run that is cut short leaves something.
    """
    limit = TIME_LIMIT[device, quick] if time_limit is None else time_limit
    started = time.monotonic()
    document: Document = {
        "schema": SCHEMA,
        "device": device,
        "quick": quick,
        "command": machine.command_line(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine.describe(device),
        "wall_seconds": 0.0,
        "load_after": None,
        "cases": [],
        "skipped": [],
    }
    threads = torch.get_num_threads()
    chosen = [case for case in cases(device, quick, threads) if only in case.name]
    extras = {} if only else _extras(device, quick)
    total = len(chosen) + len(extras)
    ceilings: Ceilings = {}
    headline = [case for case in chosen if case.axis in ("statistics", "quantiles", "streaming")]
    axes = [case for case in chosen if case not in headline]

    extras_done = 0

    def measured(case: Case) -> None:
        watch(case.name, len(document["cases"]) + len(document["skipped"]) + extras_done, total)
        if time.monotonic() - started > limit:
            document["skipped"].append({"name": case.name, "reason": f"the time limit of {limit:.0f} s was over"})
            return
        try:
            result = run_case(case, device, ceilings)
        except Exception as error:  # out of memory, say: the other cases go on
            document["skipped"].append({"name": case.name, "reason": in_words(error)})
            return
        document["cases"].append(result)
        document["wall_seconds"] = time.monotonic() - started
        finished(document)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of contenders, about empty slices
        for case in headline:
            measured(case)
        for index, (name, extra) in enumerate(extras.items()):
            watch(name, len(headline) + index, total)
            document[name] = _guarded(extra)
            extras_done = index + 1
        for case in axes:
            measured(case)
    document["wall_seconds"] = time.monotonic() - started
    document["load_after"] = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
    watch("done", total, total)
    return document


def _extras(device: str, quick: bool) -> dict[str, Callable[[], Document]]:
    extras: dict[str, Callable[[], Document]] = {"training_step": lambda: training_step.measure(device, quick)}
    if device == "cpu":
        extras["all_reduce"] = lambda: collective.measure(rounds=10 if quick else 40)
    return extras


def _guarded(extra: Callable[[], Document]) -> Document:
    threads = torch.get_num_threads()
    try:
        return extra()
    except Exception as error:
        return {"failed": in_words(error)}
    finally:
        torch.set_num_threads(threads)


def save(document: Document, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for name, value in rounded(document).items():
        if name == "cases":  # a line each, so that a changed case is a changed line
            text = "[\n" + ",\n".join("  " + json.dumps(case) for case in value) + "\n ]"
        else:
            text = json.dumps(value)
        lines.append(f" {json.dumps(name)}: {text}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def load(path: Path) -> Document:
    """A document that :func:`save` wrote.

    Raises:
        ValueError: not one of this schema.
    """
    document: Document = json.loads(path.read_text())
    if document.get("schema") != SCHEMA:
        raise ValueError(f"{path} must be a benchmark result of schema {SCHEMA}, got {document.get('schema')!r}")
    return document


def rounded(value: Any) -> Any:
    """Floats to five digits: no figure here is known better, and the files stay small. Infinities become strings."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if abs(value) < float("inf") else str(value)
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return value
