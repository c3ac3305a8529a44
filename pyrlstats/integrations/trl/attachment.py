"""``attach``: from the tensors inside a TRL trainer to the dictionary that it logs."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyrlstats.accumulator import SliceAccumulator
from pyrlstats.integrations.trl.failures import Failures
from pyrlstats.integrations.trl.families import ALL, FAMILIES, Family, masks_of, names_of, resolve
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
    # of what is asked for beside
    "n_sequences",
    "sequence_log_ratio_min",
    "sequence_log_ratio_max",
    "sequence_ess_fraction",
    "sequence_geometric_ess_fraction",
    "sequence_geometric_clip_fraction",
    "policy_clip_fraction_low",
    "policy_clip_fraction_high",
    "dual_clip_fraction",
    "update_abs_p99_9",
    "update_ess_fraction",
    "truncated_fraction_low",
    "truncated_fraction_high",
    "clamped_ess_fraction",
    "masked_ess_fraction",
    "perplexity_ess_fraction",
    "probability_diff_mean",
    "probability_diff_max",
)
"""What is logged by default of each slice, as far as it is kept; ``handle.latest`` holds everything."""

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
    sequences: bool | None = None,
    advantages: bool = False,
    dual_clip: float = 3.0,
    truncate: tuple[float, float] | None = None,
    entropy: bool = False,
    probabilities: bool = False,
    group: Any = None,
    on_stats: OnStats | None = None,
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
        slices: names of families ("tool": text, pre_tool, post_tool; "turn"; "staleness": by the age of the policy that
            wrote the tokens) and :class:`Family` objects. None takes every family that this trainer tells without
            more; "staleness" of AsyncGRPO has to be asked for. The slice "all" is always there.
        prefix: of the keys.
        statistics: names as in :meth:`pyrlstats.SliceStats.to_dict`; None logs all of them. Each key goes into the
            trainer's ``log_history`` and its checkpoints, slices x ratios times.
        clip: (low, high) of the ratio clip; None takes the trainer's epsilons.
        layout: bins of the histogram.
        sequences: statistics over whole completions too; None where the trainer's own ratio is one of those (RLOO, and
            GRPO with ``importance_sampling_level="sequence"``).
        advantages: statistics that depend on the trainer's advantages too.
        dual_clip, truncate, entropy, probabilities: as :func:`pyrlstats.slice_stats`.
        group: the process group of all ranks that hold different tokens; None is all of the trainer's processes.
        on_stats: called as ``on_stats(stats, mode, step)`` at each of these logs, on every rank, with the statistics
            by ratio in NumPy memory, "train" or "eval", and the trainer's global step.

    Returns:
        A handle, with ``latest``, ``failures`` and ``detach()``.

    Raises:
        TypeError: another trainer, or arguments of another type.
        ValueError: unknown slices or statistics, names twice, a bad clip, or a trainer that is attached already.
            The trainer is unchanged.
    """
    reader = reader_for(trainer)
    if is_hooked(trainer):
        raise ValueError("this trainer is attached already: call detach() on the handle of before")
    families = resolve(slices, reader.families, reader.known_families)
    by_sequence = reader.by_sequence or getattr(trainer, "importance_sampling_level", "token") == "sequence"

    def make(names: Sequence[str]) -> SliceAccumulator:
        return SliceAccumulator(
            names,
            layout=layout,
            clip=_epsilons(trainer) if clip is None else clip,
            device=trainer.accelerator.device,
            sequences=by_sequence if sequences is None else sequences,
            advantages=advantages,
            dual_clip=dual_clip,
            truncate=truncate,
            entropy=entropy,
            probabilities=probabilities,
        )

    logged = _checked(statistics, make([ALL]).compute())
    return Attachment(trainer, reader, families, make, prefix=prefix, logged=logged, group=group, on_stats=on_stats)


class Attachment:
    """What :func:`attach` returns.

    Attributes:
        latest: mode, "train" or "eval", -> ratio -> :class:`pyrlstats.SliceStats` of the last log, of all ranks, in
            NumPy memory.
    """

    def __init__(
        self,
        trainer: Any,
        reader: Any,
        families: Sequence[Family],
        make: Callable[[Sequence[str]], SliceAccumulator],
        *,
        prefix: str,
        logged: frozenset[str],
        group: Any,
        on_stats: OnStats | None,
    ) -> None:
        self.latest: dict[str, Stats] = {}
        self._trainer, self._reader, self._families = trainer, reader, families
        self._prefix, self._logged, self._on_stats = prefix, logged, on_stats
        self._failures = Failures()
        names = names_of(families)
        self._windows = {mode: Window(reader.ratios, lambda: make(names)) for mode in ("train", "eval")}
        self._reducer = Reducer(reader.ratios, names, make, group, trainer.accelerator.num_processes)
        self._keeps = {one.name for one in self._reducer.groups}
        self._hooks = Hooks(trainer)
        reader(trainer, self._hooks, self._deliver, self._failures, FAMILIES["staleness"] in families)
        self._hooks.wrap("log", self._log)

    @property
    def failures(self) -> dict[str, int]:
        """What could not be done -> how often."""
        return self._failures.counts

    def detach(self) -> None:
        """Restore the trainer: its methods are the objects they were. Once more does nothing.

        A method that someone else has wrapped since is left as it is, and logged; the wrapper in it does nothing more.
        """
        buried = self._hooks.restore()
        if buried:
            self._failures.say_once(
                logging.WARNING,
                f"pyrlstats: {', '.join(buried)} of the trainer has been wrapped by someone else since attach(): left "
                "as it is; the wrapper of pyrlstats inside of it only passes calls on.",
            )

    def _deliver(self, read: Callable[[], Tokens]) -> None:
        window = self._windows["train" if self._trainer.model.training else "eval"]
        window.micro_batches += 1  # whatever happens next: the ranks must agree on whether there is something to reduce
        self._failures("count a micro-batch", self._count, window, read)

    def _count(self, window: Window, read: Callable[[], Tokens]) -> None:
        tokens = read()
        for whose, (level, text) in self._reader.absent.items():
            if whose not in tokens.logps:
                self._failures.say_once(level, text)
        masks = masks_of(self._families, tokens)
        beside = {
            "advantages": tokens.advantages if "advantages" in self._keeps else None,
            "cu_seqlens": tokens.cu_seqlens if "sequences" in self._keeps else None,
        }
        for ratio, accumulator in window.accumulators.items():
            new, old = RATIOS[ratio]
            if new in tokens.logps and old in tokens.logps:
                accumulator.update(tokens.logps[new], tokens.logps[old], masks, mask=tokens.mask, **beside)
                window.counted.add(ratio)

    def _log(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def log(logs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            logs.update(self._failures("report", self._report, logs) or {})
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
        for one in stats.values():
            self._reader.correct(one.state)
        self.latest[mode] = stats
        if self._on_stats is not None:
            self._failures("call on_stats", self._on_stats, stats, mode, self._trainer.state.global_step)
        prefix = before + self._prefix
        report: dict[str, float] = {}
        for ratio, one in stats.items():
            report.update(self._selected(one, f"{prefix}{ratio}/"))
        failed = sum(self.failures.values())
        return {**report, f"{prefix}failures": failed} if failed else report

    def _selected(self, stats: SliceStats, prefix: str) -> dict[str, float]:
        """The statistics to log: of an empty slice its n_tokens, for its NaN is no JSON."""
        empty = {name for name, n_tokens in zip(stats, stats.state.count("n_tokens"), strict=True) if n_tokens == 0}
        chosen = {}
        for key, value in stats.to_dict().items():
            name, _, statistic = key.rpartition("/")
            wanted = statistic in self._logged and (statistic == "n_tokens" or name not in empty)
            if wanted and not math.isnan(value):
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
    if isinstance(low, (int, float)) and isinstance(high, (int, float)) and 0 < low < 1 and high > 0:
        return float(low), float(high)
    return 0.2, 0.2


def _checked(statistics: Sequence[str] | None, like: SliceStats) -> frozenset[str]:
    known = [key.rpartition("/")[2] for key in like.to_dict()]
    if statistics is None:
        return frozenset(known)
    if isinstance(statistics, str):
        raise TypeError(f"statistics must be a sequence of names, got the string {statistics!r}: use [{statistics!r}]")
    unknown = [name for name in statistics if name not in known]
    if unknown and statistics is not STATISTICS:
        raise ValueError(f"statistics must be among {known}, got {unknown}")
    return frozenset(statistics)
