"""``attach``: from the tensors inside a TRL trainer to the dictionary that it logs."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyrlstats.accumulator import SliceAccumulator
from pyrlstats.integrations.trl.failures import Failures
from pyrlstats.integrations.trl.families import Family, masks_of, names_of, resolve
from pyrlstats.integrations.trl.hooks import Hooks, is_hooked
from pyrlstats.integrations.trl.pooling import Reducer, Stats, Window
from pyrlstats.integrations.trl.readers import reader_for
from pyrlstats.integrations.trl.tokens import RATIOS, Tokens
from pyrlstats.layout import Layout
from pyrlstats.slice_stats import SliceStats

STATISTICS = (
    "n_tokens",
    "n_finite",
    "zero_fraction",
    "log_ratio_mean",
    "log_ratio_min",
    "log_ratio_max",
    "abs_log_ratio_p50",
    "abs_log_ratio_p99",
    "abs_log_ratio_p99_9",
    "kl_k3",
    "ess_fraction",
    "clip_fraction",
)
"""What is logged by default, of each slice; ``handle.latest`` holds everything."""

_DEFAULT_LAYOUT = Layout()

OnStats = Callable[[Stats, str, int], None]


def attach(
    trainer: Any,
    *,
    slices: Sequence[str | Family] | None = None,
    prefix: str = "rl/",
    statistics: Sequence[str] | None = STATISTICS,
    clip: tuple[float, float] | None = None,
    layout: Layout = _DEFAULT_LAYOUT,
    group: Any = None,
    on_stats: OnStats | None = None,
    accumulator_options: Mapping[str, Any] | None = None,
) -> Attachment:
    """Add log-ratio statistics to what a TRL trainer logs. Call it on every rank, before ``trainer.train()``.

    Counts the tokens of every micro-batch where they lie, without a sync. Whenever the trainer logs a training loss or
    an evaluation, what was counted since is pooled over the ranks (one MAX and one SUM all-reduce for all ratios and
    slices), copied to the host once, and added to ``logs`` as ``prefix + ratio/slice/statistic``, in evaluations with
    TRL's ``eval_`` before it. The first reduction compares the ranks' slices in one more small collective. Losses,
    weights and random numbers stay the same to the bit.

    Ratios that do not exist in a configuration are left out, and a log message says once why. A slice without tokens
    has its ``n_tokens`` only. What fails in here is counted in ``handle.failures`` and logged once; it never reaches
    the trainer.

    Args:
        trainer: a GRPOTrainer, RLOOTrainer or AsyncGRPOTrainer, or one that derives from them.
        slices: names of families ("tool": text, pre_tool, post_tool; "turn"; "staleness": optimizer steps since the
            batch was generated) and :class:`Family` objects. None takes every family that this trainer knows. The
            slice "all" is always there.
        prefix: of the keys.
        statistics: names as in :meth:`pyrlstats.SliceStats.to_dict`; None logs all of them. Each key goes into the
            trainer's ``log_history`` and its checkpoints, slices x ratios times.
        clip: (low, high) of the ratio clip; None takes the trainer's epsilons.
        layout: bins of the histogram.
        group: the process group of all ranks that hold different tokens; None is all of the trainer's processes.
        on_stats: called as ``on_stats(stats, mode, step)`` at each of these logs, on every rank, with the statistics
            by ratio in NumPy memory, "train" or "eval", and the trainer's global step.
        accumulator_options: passed on to :class:`pyrlstats.SliceAccumulator`.

    Returns:
        A handle, with ``latest``, ``failures`` and ``detach()``.

    Raises:
        TypeError: another trainer, or arguments of another type.
        ValueError: unknown slices or statistics, names twice, a bad clip, or a trainer that is attached already.
            The trainer is unchanged.
    """
    return Attachment(
        trainer, slices, prefix, statistics, clip, layout, group, on_stats, dict(accumulator_options or {})
    )


class Attachment:
    """What :func:`attach` returns.

    Attributes:
        latest: mode, "train" or "eval", -> ratio -> :class:`pyrlstats.SliceStats` of the last log, of all ranks, in
            NumPy memory.
    """

    def __init__(
        self,
        trainer: Any,
        slices: Sequence[str | Family] | None,
        prefix: str,
        statistics: Sequence[str] | None,
        clip: tuple[float, float] | None,
        layout: Layout,
        group: Any,
        on_stats: OnStats | None,
        accumulator_options: dict[str, Any],
    ) -> None:
        reader = reader_for(trainer)
        if is_hooked(trainer):
            raise ValueError("this trainer is attached already: call detach() on the handle of before")
        self._families, self._absent = resolve(slices, reader.families), reader.absent
        self._trainer, self._prefix, self._on_stats = trainer, prefix, on_stats
        self.latest: dict[str, Stats] = {}
        self._failures = Failures()
        names, device = names_of(self._families), trainer.accelerator.device
        bounds = _epsilons(trainer) if clip is None else clip

        def make(names: Sequence[str]) -> SliceAccumulator:
            return SliceAccumulator(names, layout=layout, clip=bounds, device=device, **accumulator_options)

        self._windows = {mode: Window(reader.ratios, lambda: make(names)) for mode in ("train", "eval")}
        self._reducer = Reducer(reader.ratios, names, make, group, trainer.accelerator.num_processes)
        self._statistics = None if statistics is None else _checked(statistics, make(["all"]).compute())
        self._hooks = Hooks(trainer)
        reader(trainer, self._hooks, self._count, self._failures.caught)
        self._hooks.wrap("log", self._log)

    @property
    def failures(self) -> dict[str, int]:
        """What could not be done -> how often."""
        return dict(self._failures.counts)

    def detach(self) -> None:
        """Restore the trainer: its methods are the objects they were. Once more does nothing.

        A method that someone else has wrapped since is left as it is, and logged; the wrapper in it does nothing more.
        """
        buried = self._hooks.restore()
        if buried:
            self._failures.say_once(
                logging.WARNING,
                f"{', '.join(buried)} of the trainer has been wrapped by someone else since attach(): left as it is; "
                "the wrapper of pyrlstats inside of it only passes calls on.",
            )

    def _count(self, read: Callable[[], Tokens]) -> None:
        mode = "train" if self._trainer.model.training else "eval"
        window = self._windows[mode]
        window.micro_batches += 1  # whatever happens next: the ranks must agree on whether there is something to reduce
        with self._failures.caught("count a micro-batch"):
            tokens = read()
            for whose, (level, text) in self._absent.items():
                if whose not in tokens.logps:
                    self._failures.say_once(level, text)
            masks = masks_of(self._families, tokens)
            for ratio, accumulator in window.accumulators.items():
                new, old = RATIOS[ratio]
                if new in tokens.logps and old in tokens.logps:
                    accumulator.update(tokens.logps[new], tokens.logps[old], masks, mask=tokens.mask)
                    window.counted.add(ratio)

    def _log(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def log(logs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            with self._failures.caught("report"):
                logs.update(self._report(logs))
            return original(logs, *args, **kwargs)

        return log

    def _report(self, logs: Mapping[str, Any]) -> dict[str, float]:
        mode, before = _occasion(logs)
        if mode is None:
            return {}
        window = self._windows[mode]
        if window.micro_batches == 0:
            if "loss" in logs:
                self._failures.say_once(logging.WARNING, _NO_LOSS)
            return {}
        stats = self._reducer.take(window)
        self.latest[mode] = stats
        if self._on_stats is not None:
            with self._failures.caught("call on_stats"):
                self._on_stats(stats, mode, self._trainer.state.global_step)
        prefix = before + self._prefix
        report: dict[str, float] = {}
        for ratio, one in stats.items():
            report.update(self._selected(one, f"{prefix}{ratio}/"))
        failed = sum(self._failures.counts.values())
        return {**report, f"{prefix}failures": failed} if failed else report

    def _selected(self, stats: SliceStats, prefix: str) -> dict[str, float]:
        """The statistics to log: of an empty slice its n_tokens, for its NaN is no JSON."""
        empty = {name for name, n_tokens in zip(stats, stats.state.count("n_tokens"), strict=True) if n_tokens == 0}
        chosen = {}
        for key, value in stats.to_dict().items():
            name, _, statistic = key.rpartition("/")
            wanted = self._statistics is None or statistic in self._statistics
            if wanted and (statistic == "n_tokens" or name not in empty) and not math.isnan(value):
                chosen[prefix + key] = value
        return chosen


_NO_LOSS = (
    "pyrlstats: the trainer logged a loss, but no micro-batch has come by since the last log: a loss that does not go "
    "through the trainer's own method, as a fused one that never makes log-probabilities, cannot be read."
)


def _occasion(logs: Mapping[str, Any]) -> tuple[str | None, str]:
    """The window that a log closes, and the prefix of its keys.

    Only what the trainer itself logs on every rank counts: a rank that calls ``trainer.log`` alone must not wait for
    the others in a collective.
    """
    if "loss" in logs or "train_runtime" in logs:
        return "train", ""
    for key in logs:
        if key.endswith("_runtime"):
            return "eval", key.removesuffix("runtime")
    return None, ""


def _epsilons(trainer: Any) -> tuple[float, float]:
    """The trainer's clip, where it is one."""
    low, high = getattr(trainer, "epsilon_low", None), getattr(trainer, "epsilon_high", None)
    if isinstance(low, float) and isinstance(high, float) and 0 < low < 1 and high > 0:
        return low, high
    return 0.2, 0.2


def _checked(statistics: Sequence[str], like: SliceStats) -> frozenset[str]:
    known = [key.rpartition("/")[2] for key in like.to_dict()]
    if isinstance(statistics, str):
        raise TypeError(f"statistics must be a sequence of names, got the string {statistics!r}: use [{statistics!r}]")
    unknown = [name for name in statistics if name not in known]
    if unknown:
        raise ValueError(f"statistics must be among {known}, got {unknown}")
    return frozenset(statistics)
