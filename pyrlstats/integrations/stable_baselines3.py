"""Stable-Baselines3: the log-ratios of every PPO update, through SB3's own logger (extra ``[stable-baselines3]``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

try:
    from stable_baselines3.common.callbacks import BaseCallback
except ImportError as error:
    raise ImportError(
        "UpdateStatsCallback needs stable-baselines3: pip install 'pyrlstats[stable-baselines3]'"
    ) from error

import torch

from pyrlstats._guard import Guard
from pyrlstats.accumulator import SliceAccumulator
from pyrlstats.slice_stats import SliceStats
from pyrlstats.slices import pool

_ON_SCREEN = ("all/ess_fraction", "all/abs_log_ratio_p99_9", "last_epoch/kl_k3")


class UpdateStatsCallback(BaseCallback):
    """Statistics of ``x = log_prob - old_log_prob`` over all minibatches and epochs of each update of PPO.

    Slices: ``all``, ``first_epoch`` and ``last_epoch`` (the last that ran, also when ``target_kl`` stops early). They
    are recorded when the next rollout starts, so that they are dumped with SB3's own ``train/`` figures of the same
    update; after the last update, which SB3 itself never dumps, one more dump is made. All go to TensorBoard, CSV
    and JSON; three of them to the table on the screen too, whose keys have 36 characters at most.

    Works with every on-policy algorithm whose buffer yields ``old_log_prob`` and whose policy has
    ``evaluate_actions``: PPO, A2C (x is 0 there: one update a rollout), and of sb3-contrib MaskablePPO and RecurrentPPO
    (whose padding mask is honoured). It draws no random numbers and touches no tensor of the update: a run with it has
    the same bits as one without. One copy to the host an update. It never raises into training: failures are counted
    in ``guard.failures`` and logged once.

    Clip fractions are of the clip range with which the run starts, also where a schedule changes it.

    Args:
        prefix: put before every key.
        on_stats: called with (n_updates, statistics) after each update, the last included: for sinks.
        verbose: SB3's.

    Attributes:
        stats: of the latest update, on the model's device; None before the first.
        guard: counts what failed.
    """

    def __init__(
        self,
        prefix: str = "log_ratio/",
        on_stats: Callable[[int, SliceStats], None] | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(verbose)
        self.prefix = prefix
        self.on_stats = on_stats
        self.stats: SliceStats | None = None
        self.guard = Guard("UpdateStatsCallback")
        self._update: _Update | None = None

    def _on_training_start(self) -> None:
        self._update = self.guard(_Update, self.model, self.guard)

    def _on_rollout_start(self) -> None:
        self.guard(self._record)

    def _on_training_end(self) -> None:
        if self.guard(self._record):
            self.guard(self.logger.dump, self.num_timesteps)
        if self._update is not None:
            self._update.detach()
            self._update = None

    def _on_step(self) -> bool:
        return True

    def _record(self) -> bool:
        """Whether there was an update since the last call."""
        stats = self._update.take() if self._update is not None else None
        if stats is None:
            return False
        self.stats = stats
        for key, value in stats.to_dict(self.prefix).items():
            on_screen = key.removeprefix(self.prefix) in _ON_SCREEN
            self.logger.record(key, value, exclude=None if on_screen else ("stdout", "log"))
        if self.on_stats is not None:
            self.guard(self.on_stats, getattr(self.model, "_n_updates", 0), stats)
        return True


class _Update:
    """Watches the two calls that hold the two log-probabilities: the buffer's ``get`` and the policy's evaluation.

    Both become attributes of the instances, which shadow the methods of their classes until ``detach``.
    """

    def __init__(self, model: Any, guard: Guard) -> None:
        self._buffer, self._policy, self._guard = model.rollout_buffer, model.policy, guard
        self._names = [f"epoch_{epoch}" for epoch in range(getattr(model, "n_epochs", 1))]
        self._accumulator = SliceAccumulator(self._names, clip=_clip_of(model), device=model.device)
        self._epoch = -1
        self._samples: Any = None  # of the minibatch that the policy has not evaluated yet
        get, evaluate = self._buffer.get, self._policy.evaluate_actions

        @wraps(get)
        def watched_get(*args: Any, **kwargs: Any) -> Iterator[Any]:
            self._epoch += 1
            for samples in get(*args, **kwargs):
                self._samples = samples
                yield samples
            self._samples = None

        @wraps(evaluate)
        def watched_evaluate(*args: Any, **kwargs: Any) -> Any:
            result = evaluate(*args, **kwargs)
            samples, self._samples = self._samples, None
            if samples is not None:
                self._guard(self._count, samples, result[1])
            return result

        self._buffer.get, self._policy.evaluate_actions = watched_get, watched_evaluate

    def detach(self) -> None:
        for owner, name in ((self._buffer, "get"), (self._policy, "evaluate_actions")):
            vars(owner).pop(name, None)

    def take(self) -> SliceStats | None:
        """The statistics of the update since the last call; None without one."""
        last, self._epoch = self._epoch, -1
        if last < 0:
            return None
        stats = self._accumulator.compute()
        self._accumulator.reset()
        return pool(stats, {"all": self._names, "first_epoch": self._names[:1], "last_epoch": [self._names[last]]})

    def _count(self, samples: Any, log_prob: torch.Tensor) -> None:
        old_log_prob = samples.old_log_prob
        ids = torch.full(log_prob.shape, self._epoch, dtype=torch.int32, device=log_prob.device)
        padding = getattr(samples, "mask", None)  # RecurrentPPO pads its sequences
        self._accumulator.update(log_prob, old_log_prob, slice_ids=ids, mask=None if padding is None else padding > 0.5)


def _clip_of(model: Any) -> tuple[float, float]:
    """PPO's clip range where it starts; the accumulator's own default for algorithms without one."""
    schedule = getattr(model, "clip_range", None)
    start = float(schedule(1.0)) if callable(schedule) else 0.2
    return min(start, 0.99), start
