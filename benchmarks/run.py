"""One case, from inputs to rows: gate, memory, time, roofline."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import torch

from . import gate, memory, roofline, timing
from .contenders import ALL, Contender
from .exact import Exact, errors, exact
from .inputs import BASE, Inputs, pool
from .machine import last_level_cache
from .registry import Case
from .roofline import Reader
from .timing import GPU_CACHE, Figure, Runner

MOST_INPUTS = 1024
SMALL = 1 << 15  # tokens
LARGE = 8 << 20  # bytes from which the readers of the same case give the ceiling

Row = dict[str, Any]
Ceilings = dict[tuple[str, int | None], float]  # (dtype, threads) -> bytes a second


def inputs_of(case: Case, device: str) -> list[Inputs]:
    """Inputs for rotation: together twice the largest cache where that is possible."""
    cache = GPU_CACHE if device == "cuda" else last_level_cache()
    most = 2 * BASE if device == "cuda" else BASE
    wanted = 1 << (2 * cache // case.spec.bytes_per_token()).bit_length()
    tokens = max(case.tokens, min(wanted, most, case.tokens * MOST_INPUTS))
    found = list(pool(case.spec, tokens, device).cut(case.tokens, case.micro_batches))
    if case.tokens < SMALL:  # where a slice is empty, plain torch raises
        found = [inputs for inputs in found if all(bool(mask.any()) for mask in inputs.members())] or found
    if case.spec.masks == "none":
        for inputs in found:
            inputs.members()  # the mask of everything is made now, not inside a measurement
    return found


def run_case(case: Case, device: str, ceilings: Ceilings) -> dict[str, Any]:
    """Measure one case; ``ceilings`` are used for small inputs and updated by large ones."""
    threads = torch.get_num_threads()
    if device == "cpu":
        torch.set_num_threads(case.threads)
    try:
        return _measured(case, device, ceilings)
    finally:
        torch.set_num_threads(threads)
        gc.collect()  # graphs hold memory of the device
        if device == "cuda":
            torch.cuda.empty_cache()


def _measured(case: Case, device: str, ceilings: Ceilings) -> dict[str, Any]:
    inputs = inputs_of(case, device)
    answer = exact(inputs[0])
    admitted = [_admit(ALL[name], case, inputs[0], answer) for name in case.contenders]
    readers = roofline.readers(device, max(case.threads, _most_threads(case)))
    reading = [Runner(reader.name, reader.read, None, capturable=device == "cuda") for reader in readers]
    timing.measure([runner for _, runner in admitted if runner is not None] + reading, inputs, case.seconds)
    alive = [(reader, runner) for reader, runner in zip(readers, reading, strict=True) if runner.failure is None]
    ceiling = _ceilings(alive, case, ceilings)
    for name, (row, runner) in zip(case.contenders, admitted, strict=True):
        if runner is not None and runner.failure is not None:
            row |= {"status": "failed", "reason": runner.failure}
        elif runner is not None:
            _fill(row, runner, ALL[name], case, device, ceiling)
    rotated = timing.graph_calls(inputs) if device == "cuda" else len(inputs)
    cache = GPU_CACHE if device == "cuda" else last_level_cache()
    return {
        "name": case.name,
        "axis": case.axis,
        "tokens": case.tokens,
        "micro_batches": case.micro_batches,
        "threads": case.threads,
        "bytes": case.n_bytes,
        "cold": min(rotated, len(inputs)) * case.n_bytes > cache,
        "spec": dataclasses.asdict(case.spec),
        "ceilings": [
            {"name": reader.name, "threads": reader.threads, "seconds": _figure(runner.device or runner.total)}
            for reader, runner in alive
        ],
        "rows": [row for row, _ in admitted],
    }


def _most_threads(case: Case) -> int:
    return max((ALL[name].threads or 1 for name in case.contenders), default=1)


def _admit(contender: Contender, case: Case, first: Inputs, answer: Exact) -> tuple[Row, Runner | None]:
    """Run it once and check what it says; a runner only for those that are right."""
    row: Row = {"contender": contender.name, "family": contender.family, "note": contender.note}
    reason = contender.reason_to_skip(first)
    if reason is not None:
        return row | {"status": "skipped", "reason": reason}, None
    try:
        launch, collect = contender.make(first)
        results = collect(launch(first))
        row["errors"] = errors(results, answer)
        row["tolerance"] = contender.tolerance.text()
        violation = gate.check(results, answer, contender.tolerance)
        if violation is not None:
            return row | {"status": "wrong", "reason": violation}, None
        if case.memory:
            row["peak_bytes"] = memory.peak_extra_bytes(lambda: collect(launch(first)), first.device.type)
    except Exception as error:  # a contender that cannot do the case says why, in its row
        return row | {"status": "failed", "reason": timing.in_words(error)}, None
    return row | {"status": "ok"}, Runner(contender.name, launch, collect, contender.capturable)


def _ceilings(reading: list[tuple[Reader, Runner]], case: Case, known: Ceilings) -> dict[int | None, float]:
    """Bytes a second by number of threads: of this case where it is large, else at least of the last large one."""
    found: dict[int | None, float] = {}
    for threads in {reader.threads for reader, _ in reading}:
        figures = [Figure.of(runner.device or runner.total) for reader, runner in reading if reader.threads == threads]
        here = case.n_bytes / timing.best(figures).median
        key = (case.spec.dtype, threads)
        if case.n_bytes >= LARGE:
            known[key] = here
        found[threads] = max(here, known.get(key, 0.0)) if case.n_bytes < LARGE else here
    return found


def _fill(
    row: Row, runner: Runner, contender: Contender, case: Case, device: str, ceiling: dict[int | None, float]
) -> None:
    row["seconds"] = _figure(runner.total)
    row["launch_seconds"] = _figure(runner.launched)
    row["device_seconds"] = _figure(runner.device) if runner.device else None
    if contender.family == "ours":
        threads = None if device == "cuda" else contender.threads or case.threads
        reading = case.n_bytes / ceiling[threads]
        row["roofline_seconds"] = reading
        row["roofline_fraction"] = reading / (row["device_seconds"] or row["launch_seconds"])["median"]


def _figure(samples: list[float]) -> dict[str, float]:
    return dataclasses.asdict(Figure.of(samples))
