"""The page: one self-contained HTML file with the picture, the last steps, some episodes and what each figure means."""

from __future__ import annotations

import base64
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import torch

from pyrlstats.demo.display import FEW, describe, few_beyond, percent, tail_line
from pyrlstats.demo.reading import reading
from pyrlstats.demo.rollout import Rollout
from pyrlstats.demo.slices import NAMES, Role
from pyrlstats.demo.task import SYMBOLS
from pyrlstats.demo.training import Score, Step
from pyrlstats.demo.windows import Window, first_and_last
from pyrlstats.slice_stats import SliceStats

LAST_STEPS = 5

# column -> (key of to_dict, format, what it means)
FIGURES = {
    "tokens": ("n_tokens", "{:,}", "tokens of the slice, counted once in every update that used them"),
    "ESS": (
        "ess_fraction",
        "{:.2%}",
        "effective sample size over tokens, (sum w)² / (n sum w²) with w = exp(x): the share of the tokens that still "
        "carries weight when samples of the old policy stand for the new one",
    ),
    "|x| p50": ("abs_log_ratio_p50", "{:.2g}", "half of the tokens have a log-ratio smaller than this, in nats"),
    "|x| p99": ("abs_log_ratio_p99", "{:.3g}", "one token in a hundred is further from the sampler than this"),
    "|x| p99.9": ("abs_log_ratio_p99_9", "{:.3g}", "one token in a thousand is further"),
    "|x| p99.99": ("abs_log_ratio_p99_99", "{:.3g}", "one token in ten thousand; with fewer tokens, the largest"),
    "clipped": ("clip_fraction", "{:.2%}", "share of tokens whose ratio w is outside the clip range"),
    "KL k3": ("kl_k3", "{:.2e}", "mean of w - 1 - x: an estimate of KL(old, new) that is never negative, in nats"),
    "max w": ("ratio_max", "{:.3g}", "the largest ratio; PPO's clip hides it from the loss, not from the mean"),
}


def write_page(
    path: Path,
    picture: Path,
    steps: list[Step],
    scores: dict[str, Score],
    summary: dict[str, Any],
    episodes: Rollout,
) -> None:
    """Write the page; it needs no network and no other file.

    Args:
        path: the page.
        picture: PNG that is put inside.
        steps, scores, summary: the run.
        episodes: episodes to show, by the policy as it is now.
    """
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string((files("pyrlstats.demo") / "report.html.j2").read_text())
    compared = first_and_last(steps)
    tables = [*compared, *(Window(f"step {step.number}", step.stats) for step in steps[-LAST_STEPS:])]
    page = template.render(
        summary=summary,
        scores={name: describe(score) for name, score in scores.items()},
        picture=base64.b64encode(picture.read_bytes()).decode(),
        tails=[tail_line(window) for window in compared],
        reading=reading(*compared),
        few=FEW,
        columns=list(FIGURES),
        tables=[(name, _rows(stats)) for name, stats in tables],
        meanings={name: meaning for name, (_, _, meaning) in FIGURES.items()},
        episodes=[_pieces(*row) for row in zip(episodes.tokens, episodes.roles, strict=True)],
    )
    path.write_text(page, encoding="utf-8")


QUANTILES = {
    "abs_log_ratio_p50": 0.5,
    "abs_log_ratio_p99": 0.99,
    "abs_log_ratio_p99_9": 0.999,
    "abs_log_ratio_p99_99": 0.9999,
}


def _rows(stats: SliceStats) -> list[tuple[str, list[str]]]:
    """The table of one window: slice -> formatted figures."""
    values = stats.to_dict()
    few = {key: few_beyond(stats, q) for key, q in QUANTILES.items()}
    return [
        (
            name,
            [
                _cell(values[f"{name}/{key}"], f"~{form}" if key in few and few[key][name] else form)
                for key, form, _ in FIGURES.values()
            ],
        )
        for name in NAMES
    ]


def _cell(value: float, form: str) -> str:
    return "-" if value != value else percent(value) if form == "{:.2%}" else form.format(value)


def _pieces(tokens: torch.Tensor, roles: torch.Tensor) -> list[tuple[str, str]]:
    """An episode as runs of one role: (role, text)."""
    pieces: list[tuple[str, str]] = []
    for token, role in zip(tokens.tolist()[1:], roles.tolist()[1:], strict=True):
        if role == Role.PAD:
            break
        name = Role(role).name.lower()
        if pieces and pieces[-1][0] == name:
            pieces[-1] = (name, pieces[-1][1] + SYMBOLS[token])
        else:
            pieces.append((name, SYMBOLS[token]))
    return pieces
