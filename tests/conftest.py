"""Engines under test, fresh random data with a printed seed, poisoned uninitialised memory."""

from __future__ import annotations

import importlib
import os
import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import extension
import numpy as np
import promises
import pytest
import torch

import pyrlstats
from pyrlstats import _dispatch, reference
from pyrlstats.layout import Layout
from pyrlstats.state import State

CLIP = (0.2, 0.2)

# A new backend is tested by adding its name. "reference" is what they are tested against.
TESTED = ("cpp", "torch", "numba")


@dataclass(frozen=True)
class Engine:
    """One way to fill a state: a backend, and for ``cpp`` one of its instruction sets."""

    backend: str
    isa: str | None = None

    def __str__(self) -> str:
        return self.backend if self.isa is None else f"{self.backend}:{self.isa}"

    @contextmanager
    def forced(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYRLSTATS_BACKEND", self.backend)
            if self.isa is not None:
                patch.setenv("PYRLSTATS_ISA", self.isa)
            yield

    @property
    def parts(self) -> float:
        """How nearly near ones' x and x^2 are known beside far tokens (``promises.sum_bounds``)."""
        return promises.OTHER if self.backend == "cpp" else promises.EXACT

    @property
    def takes_numpy(self) -> bool:
        return None in _dispatch.BACKENDS[self.backend][1]

    def stats(self, logp: Any, old_logp: Any, masks: Any = None, **options: Any) -> pyrlstats.SliceStats:
        if not self.takes_numpy:
            logp, old_logp, masks = as_tensors(logp), as_tensors(old_logp), as_tensors(masks)
            options = {name: value if name == "names" else as_tensors(value) for name, value in options.items()}
        with self.forced():
            return pyrlstats.slice_stats(logp, old_logp, masks, **options)

    def state(self, logp: Any, old_logp: Any, masks: Any = None, **options: Any) -> State:
        """The state in NumPy memory."""
        return self.stats(logp, old_logp, masks, **options).state.to_host()


def as_tensors(value: Any) -> Any:
    """Arrays, alone or in a collection, as tensors; anything else as it is."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.require(value, requirements=["C", "A", "W"]))
    if isinstance(value, dict):
        return {name: as_tensors(one) for name, one in value.items()}
    return [as_tensors(one) for one in value] if isinstance(value, list) else value


def usable_isas() -> list[str]:
    """The instruction sets of the compiled extension that this machine has."""
    return list(importlib.import_module("pyrlstats.backends.cpp").instruction_sets())


def engines() -> list[Engine]:
    found = []
    for name in TESTED:
        if name not in _dispatch.BACKENDS or _dispatch.unavailable(name) is not None:
            continue
        found += [Engine(name, isa) for isa in usable_isas()] if name == "cpp" else [Engine(name)]
    return found


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, help="seed of the random data; a fresh one each run by default")
    parser.addoption("--extension", type=Path, help="a compiled extension in the place of the installed one")


# clients that would look for a network, or tell somebody that they are used
OFFLINE = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "WANDB_ERROR_REPORTING": "false",
}


def pytest_configure(config: pytest.Config) -> None:
    os.environ.update(OFFLINE)
    if config.option.extension is not None:
        extension.load(config.option.extension)
    if config.option.seed is None:  # one for all processes of pytest-xdist
        config.option.seed = getattr(config, "workerinput", {}).get("seed")
    if config.option.seed is None:
        config.option.seed = random.SystemRandom().randrange(1 << 32)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long comes first: at the end one process would be left with it."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["seed"] = node.config.option.seed


def pytest_report_header(config: pytest.Config) -> list[str]:
    names = ", ".join(str(engine) for engine in engines())
    return [f"random data: --seed={config.option.seed}", f"engines against the reference: {names}"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "engine" in metafunc.fixturenames:
        metafunc.parametrize("engine", engines(), ids=str)


@pytest.fixture(scope="session", autouse=True)
def away_from_the_tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Child processes import the installed package, not the source tree, which has no extension."""
    before = os.getcwd()
    os.chdir(tmp_path_factory.mktemp("away"))
    yield
    os.chdir(before)


@pytest.fixture(scope="session", autouse=True)
def _no_silent_fallback() -> None:
    """The default backend of this machine must be the fast one, or another one asked for by name."""
    if not os.environ.get("PYRLSTATS_BACKEND"):
        reason = _dispatch.unavailable("cpp")
        assert reason is None, f"{reason}; to test without the extension set PYRLSTATS_BACKEND=torch"


@pytest.fixture(scope="session", autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """Uninitialised memory is full of NaN or of large integers: whoever reads it is found out."""

    def poisoned(function: Any) -> Any:
        def allocate(*args: Any, **kwargs: Any) -> Any:
            array = function(*args, **kwargs)
            if getattr(array, "is_meta", False):
                return array
            dtype = str(array.dtype).removeprefix("torch.")
            if dtype.startswith(("float", "bfloat", "complex")):
                array[...] = float("nan")
            elif dtype.startswith(("int", "uint")):
                array[...] = 93
            return array

        return allocate

    with pytest.MonkeyPatch.context() as patch:
        for module in (np, torch):
            for name in ("empty", "empty_like"):
                patch.setattr(module, name, poisoned(getattr(module, name)))
        yield


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Fresh for each test and run, repeatable by the seed that the header prints."""
    return np.random.default_rng([request.config.option.seed, zlib.crc32(request.node.nodeid.encode())])


@dataclass(frozen=True)
class Oracle:
    """The reference backend, and the comparison of a state with it by accumulator name."""

    clip: tuple[float, float] = CLIP

    @staticmethod
    def state(logp: Any, old_logp: Any, masks: Any = None, **options: Any) -> State:
        return Engine("reference").state(logp, old_logp, masks, **options)

    def check_call(self, engine: Engine, logp: Any, old_logp: Any, masks: Any = None, **options: Any) -> State:
        """Assert that an engine's state of one call is right in every accumulator of every slice; return it."""
        __tracebackhide__ = True
        wanted = self.state(logp, old_logp, masks, **options)
        x = np.asarray(np.abs(reference.log_ratio(as_numpy(logp), as_numpy(old_logp))))
        zeros = np.zeros_like(x)
        if isinstance(logp, torch.Tensor):
            x, zeros = torch.from_numpy(x), torch.from_numpy(zeros)
        magnitudes = self.state(x, zeros, masks, **options)
        state = engine.state(logp, old_logp, masks, **options)
        self.check(state, wanted, magnitudes, f"{engine} differs from the reference", parts=engine.parts)
        return state

    @staticmethod
    def check(
        state: State, wanted: State, magnitudes: State, context: str = "", *, parts: float = promises.EXACT
    ) -> None:
        """Assert that every accumulator of every slice is right.

        Args:
            state, wanted: what an engine and the reference made of the same tokens.
            magnitudes: the reference's state of the same tokens with abs(x) in place of x.
            parts: see ``promises.sum_bounds``.
        """
        problems = []
        for name in COUNTS_AND_HISTOGRAM:
            got, want = _integers(state, name), _integers(wanted, name)
            if not np.array_equal(got, want):
                problems.append(f"{name}: got {got[got != want][:5]}, wanted {want[got != want][:5]}")
        for name in MAXIMA:
            # the sign of a zero is not part of an extremum
            got, want = state.maximum(name) + 0.0, wanted.maximum(name) + 0.0
            if not np.array_equal(got.view(np.int64), want.view(np.int64)):
                problems.append(f"{name}: got {got}, wanted {want}")
        for name, bound in promises.sum_bounds(wanted, magnitudes, parts).items():
            got, want = promises.sum_of(state, name), promises.sum_of(wanted, name)
            with np.errstate(invalid="ignore"):
                wrong = ~((got == want) | (np.abs(got - want) <= bound + SMALLEST))
            if wrong.any():
                problems.append(
                    f"{name}: got {got[wrong][:5]}, wanted {want[wrong][:5]}, error over {bound[wrong][:5]}"
                )
        assert not problems, "\n".join([context, *problems])


COUNTS_AND_HISTOGRAM = (*pyrlstats.layout.COUNTS, "histogram")
MAXIMA = pyrlstats.layout.MAXIMA
SMALLEST = 1e-300  # the last digits of subnormal weights are nobody's promise


def as_numpy(array: Any) -> np.ndarray:
    """The values in NumPy memory; bfloat16, which NumPy lacks, as float32."""
    if isinstance(array, np.ndarray):
        return array
    return (array.float() if array.dtype == torch.bfloat16 else array).detach().numpy()


def _integers(state: State, name: str) -> np.ndarray:
    return state.histogram if name == "histogram" else state.count(name)


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    return Oracle()


@pytest.fixture
def layout() -> Layout:
    return Layout()
