"""The compiled engine allocates nothing that grows with the number of tokens: peak memory of a whole process."""

from __future__ import annotations

import subprocess
import sys

import pytest

import pyrlstats

pytestmark = pytest.mark.skipif(
    pyrlstats.build_info()["backends"]["cpp"] != "available" or not sys.platform.startswith("linux"),
    reason="needs the compiled extension, and /proc",
)

MIB = 1 << 20

# argv: the number of tokens, the dtype, the kind of slices. Prints bytes: peak over the inputs, inputs.
CODE = """
import sys, torch, pyrlstats
n, dtype, kind = int(sys.argv[1]), getattr(torch, sys.argv[2]), sys.argv[3]


def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024


def call(logp, old_logp, mask):
    if kind == "ids":
        return pyrlstats.slice_stats(logp, old_logp, slice_ids=mask, names=["a", "b"])
    masks = {"a": mask, "b": mask, "c": mask[:1]}
    return pyrlstats.slice_stats(logp, old_logp, masks, mask=mask if kind == "base" else None)


def view(array):
    return array.view(-1, 1024).t() if kind == "transposed" else array


warm = torch.zeros(1 << 20, dtype=dtype)
call(view(warm), view(warm), view(torch.ones(1 << 20, dtype=torch.uint8)))
call(view(warm), view(warm), view(torch.ones(1 << 20, dtype=torch.uint8)))["a"].quantile([0.5, 0.99])
logp, old_logp = torch.full((n,), -0.5, dtype=dtype), torch.full((n,), -0.75, dtype=dtype)
mask = torch.full((n,), 1, dtype=torch.uint8)
logp[::3] = -0.7
before = peak()
stats = call(view(logp), view(old_logp), view(mask))
assert int(stats.state.count("n_tokens").sum()) > 0
float(stats["a" if kind == "base" else "b"].quantile(0.999))
print(peak() - before, sum(array.nbytes for array in (logp, old_logp, mask)))
"""


def grown(n: int, dtype: str, kind: str) -> tuple[int, int]:
    run = subprocess.run([sys.executable, "-c", CODE, str(n), dtype, kind], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    peak, inputs = map(int, run.stdout.split())
    return peak, inputs


@pytest.mark.parametrize(
    ("n", "dtype", "kind"),
    [
        (1 << 26, "float32", "masks"),
        (1 << 24, "bfloat16", "base"),
        (1 << 24, "float32", "transposed"),
        (1 << 24, "bfloat16", "ids"),
    ],
)
def test_peak_memory_does_not_grow_with_the_tokens(n, dtype, kind):
    """Up to 64M tokens: less than 4 MiB over the inputs, where one byte a token would be 16 MiB or more."""
    grown_small, _ = grown(1 << 20, dtype, kind)
    grown_big, inputs = grown(n, dtype, kind)
    assert inputs >= 5 * n
    assert grown_big < 4 * MIB
    assert grown_big - grown_small < 2 * MIB
