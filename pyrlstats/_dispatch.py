"""Which backend runs where, and the one place that calls it."""

from __future__ import annotations

import importlib
import os
import warnings
from types import ModuleType
from typing import Any

from pyrlstats._inputs import device_of
from pyrlstats.backends.batch import Batch
from pyrlstats.state import State

# name -> (module, device types it takes; None is NumPy memory, "*" any torch device)
BACKENDS: dict[str, tuple[str, tuple[str | None, ...]]] = {
    "cpp": ("pyrlstats.backends.cpp", (None, "cpu")),
    "triton": ("pyrlstats.backends.triton_gpu", ("cuda",)),
    "torch": ("pyrlstats.backends.torch_ops", (None, "*")),
    "reference": ("pyrlstats.backends.reference", (None, "cpu")),
}

_CURES = {
    "cpp": "the compiled extension is missing: reinstall pyrlstats with a C++17 compiler present",
    "triton": "Triton is missing: pip install triton",
}

_warned: set[str] = set()


def unavailable(name: str) -> str | None:
    """Why the backend cannot run here at all, or None where it can."""
    try:
        _module(name)
    except ImportError as error:
        return f"{_CURES.get(name, 'install what it needs')} ({error})"
    return None


def _module(name: str) -> ModuleType:
    return importlib.import_module(BACKENDS[name][0])


def _device_type(device: Any) -> str | None:
    return None if device is None else str(device.type)


def choose(device: Any) -> tuple[str, ModuleType]:
    """Name and module of the backend for arrays on ``device`` (None: NumPy memory).

    ``PYRLSTATS_BACKEND`` forces one. Without the fast one of this device the next one is taken, and one
    warning a process says how to get the fast path.

    Raises:
        ValueError: ``PYRLSTATS_BACKEND`` names no backend, or one that cannot take arrays on ``device``.
    """
    kind = _device_type(device)
    forced = os.environ.get("PYRLSTATS_BACKEND")
    if forced:
        return forced, _forced(forced, kind)
    fast, fallback = _preference(kind)
    try:
        return fast, _module(fast)
    except ImportError:
        reason = unavailable(fast)
        if fast not in _warned:
            _warned.add(fast)
            warnings.warn(f"pyrlstats runs its slow {fallback!r} backend: {reason}", RuntimeWarning, stacklevel=4)
        return fallback, _module(fallback)


def _preference(kind: str | None) -> tuple[str, str]:
    if kind is None:
        return "cpp", "reference"
    if kind == "cpu":
        return "cpp", "torch"
    if kind == "cuda":
        return "triton", "torch"
    return "torch", "torch"


def _forced(name: str, kind: str | None) -> ModuleType:
    if name not in BACKENDS:
        raise ValueError(f"PYRLSTATS_BACKEND must be one of {', '.join(BACKENDS)}, got {name!r}")
    kinds = BACKENDS[name][1]
    if kind not in kinds and not (kind is not None and "*" in kinds):
        where = "NumPy arrays" if kind is None else f"{kind} tensors"
        raise ValueError(f"PYRLSTATS_BACKEND={name} cannot take {where}: unset it or choose another backend")
    try:
        return _module(name)
    except ImportError as error:
        raise ValueError(f"PYRLSTATS_BACKEND={name} is not available: {unavailable(name)}") from error


def accumulate(batch: Batch, state: State) -> None:
    """Add a batch to a state on the same device, in place."""
    _, backend = choose(device_of(batch.logp))
    backend.accumulate(batch, state)
