"""Interleaved timing on cold inputs: everybody takes turns, so that what disturbs the machine disturbs all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .inputs import Inputs

SHORTEST = 2e-4  # seconds a sample: quicker calls are repeated
MOST_SAMPLES = 60
FEWEST_SAMPLES = 3
GRAPH_CALLS = 128  # at most so many calls on rotating inputs in one CUDA graph
GPU_CACHE = 64 << 20  # bytes: no GPU here has a larger L2


@dataclass(frozen=True)
class Figure:
    """A median and its spread, in seconds."""

    median: float
    p20: float
    p80: float
    samples: int

    @classmethod
    def of(cls, seconds: list[float]) -> Figure:
        ordered = sorted(seconds)
        last = len(ordered) - 1
        return cls(statistics.median(ordered), ordered[round(0.2 * last)], ordered[round(0.8 * last)], len(ordered))


@dataclass
class Runner:
    """Something to time: ``launch`` on one set of inputs, then ``collect`` on what it returned."""

    name: str
    launch: Callable[[Inputs], Any]
    collect: Callable[[Any], Any] | None
    capturable: bool = False
    total: list[float] = field(default_factory=list)  # launch and collect, to the end of the device's work
    launched: list[float] = field(default_factory=list)  # until launch returned: on a GPU, host time
    device: list[float] = field(default_factory=list)  # replay of a CUDA graph of launch
    graph: Any = None
    repeats: int = 1
    samples: int = FEWEST_SAMPLES
    turn: int = 0
    failure: str | None = None  # why it stopped


def measure(runners: list[Runner], inputs: list[Inputs], seconds: float) -> None:
    """Fill the samples of every runner, about ``seconds`` for all of them together.

    Quick ones get more samples than slow ones, spread evenly over the rounds.
    """
    if not runners:
        return
    for runner in runners:
        _guarded(_prepare, runner, inputs, seconds / len(runners))
    rounds = max(runner.samples for runner in runners)
    for index in range(rounds):
        for runner in runners:
            # so many of the rounds, evenly: Bresenham's line
            if (index + 1) * runner.samples // rounds > index * runner.samples // rounds:
                _guarded(_sample, runner, inputs)


def in_words(error: Exception) -> str:
    """Type and first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


def _guarded(step: Callable[..., None], runner: Runner, *arguments: Any) -> None:
    """One that raises is out, and the others go on."""
    if runner.failure is not None:
        return
    try:
        step(runner, *arguments)
    except Exception as error:
        runner.failure = in_words(error)


def _prepare(runner: Runner, inputs: list[Inputs], share: float) -> None:
    if inputs[0].device.type == "cuda" and runner.capturable:
        runner.graph = _capture(runner, inputs)
    _plan(runner, inputs, share)


def _plan(runner: Runner, inputs: list[Inputs], share: float) -> None:
    """How often a sample repeats the call, and how many samples fit."""
    once = _once(runner, inputs)[1]
    if once < share / 4:  # there is time to warm up
        once = _once(runner, inputs)[1]
    runner.repeats = max(1, min(64, round(SHORTEST / once)))
    fits = int(share / (once * runner.repeats))
    runner.samples = min(MOST_SAMPLES, max(FEWEST_SAMPLES if once < 2.0 else 1, fits))


def _once(runner: Runner, inputs: list[Inputs]) -> tuple[float, float]:
    given = inputs[runner.turn % len(inputs)]
    runner.turn += 1
    cuda = given.device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    raw = runner.launch(given)
    launched = time.perf_counter()
    if runner.collect is not None:
        runner.collect(raw)
    if cuda:
        torch.cuda.synchronize()
    return launched - start, time.perf_counter() - start


def _sample(runner: Runner, inputs: list[Inputs]) -> None:
    launched = total = 0.0
    for _ in range(runner.repeats):
        some, all_of_it = _once(runner, inputs)
        launched += some
        total += all_of_it
    runner.launched.append(launched / runner.repeats)
    runner.total.append(total / runner.repeats)
    if runner.graph is not None:
        runner.device.append(_replay(runner.graph))


def graph_calls(inputs: list[Inputs]) -> int:
    """Calls in one graph: at least 4, and enough that together they read twice the cache, if these inputs can."""
    return max(4, min(GRAPH_CALLS, len(inputs), 2 * GPU_CACHE // inputs[0].n_bytes + 1))


def _capture(runner: Runner, inputs: list[Inputs]) -> tuple[Any, int] | None:
    """A CUDA graph of several launches, each on the next inputs, and their number; None where it does not work."""
    calls = [inputs[index % len(inputs)] for index in range(graph_calls(inputs))]
    torch.cuda.empty_cache()  # a graph's memory comes beside
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for given in calls[:2]:
            runner.launch(given)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            held = [runner.launch(given) for given in calls]
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    del held
    graph.replay()
    torch.cuda.synchronize()
    return graph, len(calls)


def _replay(captured: tuple[Any, int]) -> float:
    """Device seconds of one call."""
    graph, calls = captured
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / calls


def best(figures: list[Figure]) -> Figure:
    """The quicker of several ways to do the same."""
    return min(figures, key=lambda figure: figure.median)
