"""AVX-512 and NEON on a machine without them: the source of their kernels, compiled with emulated intrinsics."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path

import extension
import pytest

from pyrlstats.backends import cpp


@pytest.mark.slow
@pytest.mark.skipif("avx2" not in cpp.instruction_sets(), reason="needs AVX2")
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a compiler")
@pytest.mark.skipif(not any(importlib.metadata.distributions(name="cmeel-simde")), reason="needs cmeel-simde")
def test_instruction_sets_of_other_machines(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    core = extension.build(tmp_path / "build", extension.emulated())
    tests = extension.ROOT / "tests"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--extension={core}"]
    command += [f"--seed={request.config.option.seed}", "-k", "avx512 or neon"]
    command += [str(tests / "test_cpp.py"), str(tests / "test_conformance.py")]
    done = subprocess.run(command, cwd=extension.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
