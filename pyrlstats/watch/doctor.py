"""What works on this machine: backends, a self-test against the reference, optional packages."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pyrlstats import _dispatch
from pyrlstats._build import build_info
from pyrlstats._inputs import gate
from pyrlstats.layout import SUMS, Layout
from pyrlstats.state import State

_TOKENS = 50_000
_CLIP = (0.2, 0.2)
_SUMS = 5e-7  # what is promised of sums at any n
_NAMES = ("every", "some", "few", "none")

# extra -> the packages it brings
EXTRAS = {
    "torch": ("torch",),
    "cli": ("typer", "rich"),
    "watch": ("typer", "rich", "pydantic", "jinja2", "matplotlib"),
    "demo": ("torch", "typer", "rich", "pydantic", "jinja2", "matplotlib"),
    "bench": ("torch", "typer", "rich", "matplotlib", "jinja2"),
    "numba": ("numba",),
    "parquet": ("pyarrow",),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
    "trackio": ("trackio",),
    "prometheus": ("prometheus_client",),
    "opentelemetry": ("opentelemetry.sdk",),
    "transformers": ("transformers", "accelerate"),
    "trl": ("trl",),
    "lightning": ("lightning",),
    "stable-baselines3": ("stable_baselines3",),
    "torchmetrics": ("torchmetrics",),
}


def examine(console: Console, *, test: bool = True) -> bool:
    """Print everything; False if a backend that can run here gives other results than the reference."""
    info = build_info()
    console.print(f"pyrlstats {info['version']}, Python {info['python']}, {info['platform']}")
    healthy = True
    table = Table(box=box.SIMPLE_HEAD, title="backends", title_justify="left", padding=(0, 1))
    for title in ("backend", "where", "can it run here?", "self-test"):
        table.add_column(title, overflow="fold")
    for name, (_, kinds) in _dispatch.BACKENDS.items():
        reason = _dispatch.unavailable(name)
        if reason is not None and kinds == ("cuda",) and not _has_gpu():
            reason = "torch sees no GPU"
        where = ", ".join("NumPy" if kind is None else "any device" if kind == "*" else kind for kind in kinds)
        verdict = ""
        if reason is None and test:
            wrong = self_test(name)
            healthy = healthy and wrong is None
            verdict = "[green]equal to the reference[/]" if wrong is None else f"[bold red]{escape(wrong)}[/]"
            if name == "reference":
                verdict = "[dim]the definition[/]"
        table.add_row(name, where, "[green]yes[/]" if reason is None else f"[yellow]no:[/] {escape(reason)}", verdict)
    console.print(table)
    console.print(f"used here: {escape(', '.join(chosen()))}")
    extension = info["extension"]
    if extension is None:
        console.print(
            f"the compiled extension is missing, several times faster: {escape(_dispatch.cure_of_extension())}"
        )
    else:
        console.print(f"extension: {escape(', '.join(f'{key} {value}' for key, value in extension.items()))}")
    packages = Table(box=box.SIMPLE_HEAD, title="optional extras", title_justify="left", padding=(0, 1))
    for title in ("extra", "installed", "how to get it"):
        packages.add_column(title, overflow="fold")
    for extra, names in EXTRAS.items():
        there = {name: _version(name) for name in names}
        missing = [name for name, version in there.items() if version is None]
        cure = f"pip install 'pyrlstats[{extra}]'" if missing else ""
        found = ", ".join(f"{name} {version}" if version else f"{name} missing" for name, version in there.items())
        packages.add_row(extra, found if not missing else f"[yellow]{found}[/]", escape(cure))
    console.print(packages)
    if test:
        console.print(
            "[green]all usable backends agree[/]" if healthy else "[bold red]a backend is wrong: please report it[/]"
        )
    return healthy


def _version(name: str) -> str | None:
    try:
        if importlib.util.find_spec(name) is None:
            return None
    except ModuleNotFoundError:  # of a dotted name
        return None
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "installed"


def _has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def chosen() -> Iterator[str]:
    """Which backend takes what, on this machine."""
    kinds: list[tuple[str, Any]] = [("NumPy arrays", None)]
    if importlib.util.find_spec("torch") is not None:
        import torch

        kinds.append(("CPU tensors", torch.device("cpu")))
        if _has_gpu():
            kinds.append(("GPU tensors", torch.device("cuda")))
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for title, device in kinds:
            try:
                yield f"{_dispatch.choose(device)[0]} for {title}"
            except ValueError as error:
                yield f"none for {title} ({error})"


def self_test(name: str, seed: int = 0) -> str | None:
    """What is wrong with a backend on random tokens of every kind, or None if it agrees with the reference."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_t(2, _TOKENS) * 0.02).astype(np.float32)
    x[rng.random(_TOKENS) < 0.1] = 0.0
    x[:6] = [np.nan, np.inf, -np.inf, 50.0, -50.0, 1e-9]
    old = rng.standard_normal(_TOKENS).astype(np.float32)
    logp = (x + old).astype(np.float32)
    masks = {
        "every": np.ones(_TOKENS, bool),
        "some": rng.random(_TOKENS) < 0.3,
        "few": np.arange(_TOKENS) < 100,
        "none": np.zeros(_TOKENS, bool),
    }
    try:
        expected = _state("reference", logp, old, masks)
        found = _state(name, logp, old, masks)
    except Exception as error:  # whatever a broken installation raises is the diagnosis
        return f"raises {type(error).__name__}: {error}"
    for part in ("counts", "histogram", "maxima"):
        if not np.array_equal(getattr(found, part), getattr(expected, part)):
            return f"other {part}"
    got, wanted = _promised(found), _promised(expected)
    off = np.abs(got - wanted) > _SUMS * np.abs(wanted) + 1e-12
    return "other sums" if off.any() else None


def _promised(state: State) -> np.ndarray:
    """The sums as they are promised: x and x^2 of near and far tokens together, near ones' (w - 1)^2."""
    sums = {name: state.sum(name) for name in SUMS}
    for whole, part in (("near_x", "far_x"), ("near_excess", "near_x2"), ("near_x2", "far_x2")):
        sums[whole] = sums[whole] + sums[part]
    return np.stack([sums[name] for name in SUMS if name not in ("far_x", "far_x2")])


def _state(name: str, logp: Any, old: Any, masks: dict[str, Any]) -> State:
    backend = _dispatch._module(name)
    kinds = _dispatch.BACKENDS[name][1]
    device = None
    if None not in kinds:
        import torch

        device = torch.device("cuda" if "cuda" in kinds else "cpu")
        logp, old = (torch.from_numpy(array).to(device) for array in (logp, old))
        masks = {key: torch.from_numpy(mask).to(device) for key, mask in masks.items()}
    batch = gate(logp, old, masks, None, None, _NAMES)
    state = State.empty(_NAMES, Layout(), _CLIP, device)
    if name == "cpp":
        backend.accumulate(batch, state, None)
    else:
        backend.accumulate(batch, state)
    return state.to_host()
