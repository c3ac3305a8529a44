"""The GPU kernels on the CPU: tests/gpu/test_kernels.py in Triton's interpreter, in a process of its own.

Once as they run without inline PTX, and the tests of what only inline PTX does with that emulated.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[1]


WITH_PTX = (
    "clip or far or huge or whole or extrema or (overlapping and 4) or (slice_ids and 8-torch.int64) or adversarial"
)


@pytest.mark.slow
@pytest.mark.parametrize("ptx", [False, True], ids=["portable", "emulated PTX"])
def test_kernels_in_the_interpreter(request, ptx):
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYRLSTATS_BACKEND": "torch"}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    command += [f"--seed={request.config.option.seed}", str(ROOT / "tests" / "gpu" / "test_kernels.py")]
    if ptx:
        environment["PYRLSTATS_EMULATED_PTX"] = "1"
        command += ["-k", WITH_PTX]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
