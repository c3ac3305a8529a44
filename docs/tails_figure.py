"""Draws docs/tails.png: three tails of importance weights, and their k-hat as the number of tokens grows.

``python docs/tails_figure.py`` (needs matplotlib) takes a few seconds; the picture depends on the seed alone.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from pyrlstats.tails import k_threshold, tail_shape

KINDS = {
    "normal, sd 0.5": (lambda rng, n: rng.normal(0.0, 0.5, n), "#4878a8"),
    "Laplace, scale 0.6": (lambda rng, n: rng.laplace(0.0, 0.6, n), "#d08030"),
    "0.15 t, 3 degrees of freedom": (lambda rng, n: 0.15 * rng.standard_t(3, n), "#a83848"),
}
SIZES = (1000, 3000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
SAMPLE_SIZE = 10_000


def main() -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.0, 3.6), layout="constrained")
    for label, (draw, colour) in KINDS.items():
        rng = np.random.default_rng(7)
        x = draw(rng, SIZES[-1]).astype(np.float32)
        samples = [x[:n] for n in SIZES]
        shape = tail_shape(samples[4], 0 * samples[4])["all"]
        ordered = np.sort(samples[4])[::-1][:50_000]
        left.loglog(np.exp(ordered), np.arange(1, ordered.size + 1) / samples[4].size, color=colour, label=label)
        left.axvline(float(np.exp(shape.cutoff)), color=colour, linewidth=0.8, linestyle=":")
        own = [float(tail_shape(part, 0 * part)["all"].pareto_k) for part in samples]
        fixed = [float(tail_shape(part, 0 * part, sample_size=SAMPLE_SIZE)["all"].pareto_k) for part in samples[2:]]
        right.semilogx(SIZES, own, color=colour, marker="o", markersize=3.5)
        right.semilogx(SIZES[2:], fixed, color=colour, linestyle="--", linewidth=1.0)
    left.set_xlabel("importance weight w")
    left.set_ylabel("share of tokens with a larger one")
    left.set_title("100,000 tokens; dotted: the cutoff of the tail", fontsize=9)
    left.legend(fontsize=7, frameon=False)
    right.plot(SIZES, [k_threshold(n) for n in SIZES], color="black", linewidth=0.8)
    right.annotate("min(1 - 1/log₁₀ n, 0.7)", (1100, 0.725), fontsize=7)
    right.set_xlabel("tokens n")
    right.set_ylabel("k-hat")
    right.set_title("solid: the tail of n tokens; dashed: sample_size = 10,000", fontsize=9)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    figure.savefig(Path(__file__).parent / "tails.png", dpi=90, metadata={"Software": None})


if __name__ == "__main__":
    main()
