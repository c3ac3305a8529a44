"""The compiled extension built apart from the installed one, and put in its place in this process."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CMAKE = (sys.executable, "-m", "cmake")  # the package: one on the path may be too old, or none


def build(folder: Path, *settings: str) -> Path:
    """Build it in a folder, anew where a source has changed, with more settings of CMake's; return its path."""
    import pybind11

    subprocess.run(
        [
            *CMAKE, "-S", ROOT, "-B", folder, f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DPython_EXECUTABLE={sys.executable}", "-DSKBUILD_PROJECT_VERSION=test", *settings,
        ],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    subprocess.run([*CMAKE, "--build", folder, "--parallel", "2"], check=True, stdout=subprocess.DEVNULL)
    return next(folder.glob("_core*.so"))


def emulated() -> str:
    """The setting with which AVX-512 and NEON run on any x86-64 machine that has AVX2: with SIMDe's intrinsics."""
    headers = importlib.metadata.files("cmeel-simde") or []
    header = next(path for path in headers if path.parts[-2:] == ("x86", "avx512.h"))
    return f"-DPYRLSTATS_EMULATED={Path(header.locate()).parents[2]}"


def load(extension: Path) -> None:
    """Put it in the place of the installed one; before any backend is imported."""
    import pyrlstats

    spec = importlib.util.spec_from_file_location("pyrlstats._core", extension)
    assert spec is not None
    assert spec.loader is not None
    core = importlib.util.module_from_spec(spec)
    sys.modules["pyrlstats._core"] = core
    spec.loader.exec_module(core)
    pyrlstats._core = core  # type: ignore[attr-defined]
