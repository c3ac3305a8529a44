"""Which backend runs where, and the one place that calls it."""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

from pyrlstats._inputs import device_of
from pyrlstats.backends.batch import Batch
from pyrlstats.state import State

# name -> (module, device types it takes; None is NumPy memory, "*" any torch device)
BACKENDS: dict[str, tuple[str, tuple[str | None, ...]]] = {
    "cpp": ("pyrlstats.backends.cpp", (None, "cpu")),
    "triton": ("pyrlstats.backends.triton_gpu", ("cuda",)),
    "numba": ("pyrlstats.backends.numba_cpu", (None, "cpu")),
    "torch": ("pyrlstats.backends.torch_ops", ("*",)),
    "reference": ("pyrlstats.backends.reference", (None, "cpu")),
}

# best first, by device type; the last one is always there
_PREFERENCE: dict[str | None, tuple[str, ...]] = {
    None: ("cpp", "numba", "reference"),
    "cpu": ("cpp", "numba", "torch"),
    "cuda": ("triton", "torch"),
}


def unavailable(name: str) -> str | None:
    """Why the backend cannot run here at all, with the cure, or None where it can."""
    try:
        module = _module(name)
    except ImportError as error:
        cure = cure_of_extension() if error.name == "pyrlstats" else f"pip install {error.name or name}"
        return f"it cannot be imported ({error}): {cure}"
    reason: str | None = getattr(module, "unavailable_reason", lambda: None)()
    return reason


def cure_of_extension() -> str:
    """What to do where ``pyrlstats._core`` is missing."""
    if (Path(__file__).parents[1] / "pyproject.toml").is_file():
        return (
            "you are importing the source tree, which has no compiled extension: leave its folder to import the "
            "installed package, or pip install -e ."
        )
    return "pip install . in the source tree, with a C++17 compiler"


def _module(name: str) -> ModuleType:
    return importlib.import_module(BACKENDS[name][0])


def choose(device: Any) -> tuple[str, ModuleType]:
    """Name and module of the backend for arrays on ``device`` (None: NumPy memory).

    ``PYRLSTATS_BACKEND`` forces one. Without the fast one of this device the next one is taken, and one
    warning a process says how to get the fast path.

    Raises:
        ValueError: ``PYRLSTATS_BACKEND`` names no backend, or one that cannot take arrays on ``device``.
    """
    kind = None if device is None else device.type
    return _chosen(kind, os.environ.get("PYRLSTATS_BACKEND") or None)


@functools.cache
def _chosen(kind: str | None, forced: str | None) -> tuple[str, ModuleType]:
    if forced is not None:
        return forced, _forced(forced, kind)
    best, *others = _PREFERENCE.get(kind, ("torch",))
    reason = unavailable(best)
    if reason is None:
        return best, _module(best)
    name = next(name for name in others if unavailable(name) is None)
    warnings.warn(f"pyrlstats runs its slow {name!r} backend, not {best!r}: {reason}", RuntimeWarning, stacklevel=5)
    return name, _module(name)


def _forced(name: str, kind: str | None) -> ModuleType:
    if name not in BACKENDS:
        raise ValueError(f"PYRLSTATS_BACKEND must be one of {', '.join(BACKENDS)}, got {name!r}")
    kinds = BACKENDS[name][1]
    if kind not in kinds and not (kind is not None and "*" in kinds):
        where = "NumPy arrays" if kind is None else f"{kind} tensors"
        raise ValueError(f"PYRLSTATS_BACKEND={name} cannot take {where}: unset it or choose another backend")
    reason = unavailable(name)
    if reason is not None:
        raise ValueError(f"PYRLSTATS_BACKEND={name} is not available: {reason}")
    return _module(name)


def accumulate(batch: Batch, state: State, num_threads: int | None = None) -> None:
    """Add a batch to a state on the same device, in place; ``num_threads`` is for CPU backends with threads."""
    name, backend = choose(device_of(batch.logp))
    engine = functools.partial(backend.accumulate, num_threads=num_threads) if name == "cpp" else backend.accumulate
    if not state.groups:
        engine(batch, state)
        return
    from pyrlstats.groups.accumulate import accumulate

    own: dict[str, Any] = {}  # what the backend does itself, not by array operations
    if name == "cpp":
        own["fill"] = functools.partial(backend.fill_groups, num_threads=num_threads)
    elif name == "triton":
        own["sequence_sums"] = backend.sequence_sums
    accumulate(batch, state, engine, **own)
