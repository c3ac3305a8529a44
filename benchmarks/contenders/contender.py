"""What a contender is."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..exact import Results, Tolerance
from ..inputs import Inputs

DEFAULT = Tolerance()
GPU_SPEED = 32  # times what a CPU is given
Launch = Callable[[Inputs], Any]
Collect = Callable[[Any], Results]


@dataclass(frozen=True)
class Contender:
    """One way to get the statistics.

    ``make(inputs)`` does what is done once, outside the timed region, and returns two callables: ``launch`` reads
    the tokens; ``collect`` turns what it returned into Python numbers. Both are timed. On a GPU, ``launch`` alone is
    what is enqueued: its device time and its host time are shown apart.

    Attributes:
        name: unique.
        family: "ours", "torch", "numpy", "histogram", "sketch", "trainer" or "cupy".
        make: as above.
        note: what it does, in a line.
        tolerance: what it states about its errors.
        requires: modules that must be importable.
        devices: where it runs.
        dtypes: of log-probabilities that it takes; None for every one.
        max_values: beyond so many tokens x slices a CPU would take longer for it than for everything else together,
            so it is skipped; a GPU is given more.
        capturable: ``launch`` neither syncs nor allocates by data, so a CUDA graph can hold it.
        threads: it uses so many whatever the case says; None: as torch is told.
    """

    name: str
    family: str
    make: Callable[[Inputs], tuple[Launch, Collect]]
    note: str
    tolerance: Tolerance = DEFAULT
    requires: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[str, ...] | None = None
    max_values: int | None = None
    capturable: bool = False
    threads: int | None = None

    def reason_to_skip(self, inputs: Inputs) -> str | None:
        """Why it does not run on these inputs, or None."""
        missing = [name for name in self.requires if importlib.util.find_spec(name) is None]
        if missing:
            return f"{', '.join(missing)} is not installed"
        if inputs.device.type not in self.devices:
            return f"does not run on {inputs.device.type}"
        if self.dtypes is not None and inputs.spec.dtype not in self.dtypes:
            return f"takes no {inputs.spec.dtype}"
        if self.max_values is not None:
            limit = self.max_values * (GPU_SPEED if inputs.device.type == "cuda" else 1)
            if inputs.tokens * inputs.spec.slices > limit:
                return f"more than {limit:,} tokens x slices would take too long"
        return None


def identity(results: Results) -> Results:
    return results
