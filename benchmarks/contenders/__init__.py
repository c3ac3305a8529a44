"""Who is measured: one file a family, every contender as its users would write it."""

from __future__ import annotations

from . import cupy, histograms, numpy_exact, ours, sketches, streaming, torch_eager, trainers
from .contender import Contender

ALL: dict[str, Contender] = {
    contender.name: contender
    for module in (ours, torch_eager, numpy_exact, histograms, sketches, trainers, cupy, streaming)
    for contender in module.CONTENDERS
}

__all__ = ["ALL", "Contender"]
