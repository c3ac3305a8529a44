"""Where a run happened: the line that every figure needs beside it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from pyrlstats._build import version

PACKAGES = (
    "numpy",
    "torch",
    "triton",
    "boost-histogram",
    "fast-histogram",
    "datasketches",
    "fastdigest",
    "pytdigest",
    "ddsketch",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "cupy",
)
PACKAGE = Path(__file__).resolve().parent


def source_tree() -> Path | None:
    """Where README.md and docs/ lie beside this suite; None where it was installed without them."""
    root = PACKAGE.parent
    return root if (root / "pyproject.toml").is_file() and (root / "README.md").is_file() else None


def describe(device: str) -> dict[str, Any]:
    """CPU, GPU, versions, threads, load and commit, as JSON."""
    return {
        "cpu": cpu_name(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "last_level_cache": last_level_cache(),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "cuda": torch.version.cuda if device == "cuda" else None,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": _versions(),
        "engine": _engine(device),
        "commit": commit(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def line(machine: dict[str, Any]) -> str:
    """The machine in one line of text."""
    hardware = machine["gpu"] or f"{machine['cpu']}, {machine['cpus']} CPUs"
    versions = ", ".join(f"{name} {machine['packages'][name]}" for name in ("torch", "triton", "numpy")
                         if machine["packages"].get(name))  # fmt: skip
    parts = [hardware, f"{machine['threads']} threads", f"Python {machine['python']}", versions]
    if machine["engine"]:
        parts.append(f"engine {machine['engine']}")
    return "; ".join([*parts, f"commit {machine['commit']}", f"load {machine['load']}"])


def cpu_name() -> str:
    """Model name of the CPU, with family and model where the name says little."""
    fields: dict[str, str] = {}
    try:
        for text in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = text.partition(":")
            fields.setdefault(name.strip(), value.strip())
    except OSError:
        pass
    name = fields.get("model name") or platform.processor() or platform.machine()
    if fields.get("cpu family") and not any(character.isdigit() for character in name):
        name += f" (family {fields['cpu family']}, model {fields['model']})"
    return name


def last_level_cache() -> int:
    """Bytes of the largest cache that this CPU shows; 64 MiB where it shows none."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(text[-1], 0))
    return max(sizes, default=64 << 20)


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _engine(device: str) -> str | None:
    """Which backend, and on a CPU which instruction set, does our work."""
    from pyrlstats import _dispatch

    name, backend = _dispatch.choose(torch.device(device))
    return f"cpp ({backend.instruction_sets()[0]})" if name == "cpp" else name


def commit() -> str:
    """Short hash of the tree that runs, "+" where tracked files of it are changed; else the release, or "unknown"."""
    root = source_tree()
    if root is None:
        return f"of release {version()}"
    try:
        head = _git(root, "rev-parse", "--short=9", "HEAD")
        return head + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()


def command_line() -> str:
    """What was called, without the paths of this machine."""
    words = ["pyrlstats" if Path(sys.argv[0]).name == "pyrlstats" else "python -m benchmarks"]
    arguments = iter(sys.argv[1:])
    for argument in arguments:
        if argument in ("--json", "--commit"):
            next(arguments, None)
        elif not argument.startswith(("--json=", "--commit=")):
            words.append(argument)
    return " ".join(words)
