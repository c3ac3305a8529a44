"""Lightning: a callback that fills its loggers (extra ``pyrlstats[lightning]``)."""

from __future__ import annotations

from typing import Any

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback
    except ImportError as error:
        raise ImportError("SliceCallback needs lightning: pip install 'pyrlstats[lightning]'") from error

from pyrlstats._guard import Guard
from pyrlstats._inputs import Masks
from pyrlstats.integrations.reporter import Reporter


class SliceCallback(Callback):  # type: ignore[misc]
    """Log-ratio statistics every so many optimizer steps, over all ranks and micro-batches since the time before.

    Your ``training_step`` calls :meth:`update`. Keys go to the trainer's loggers, to ``trainer.callback_metrics``
    (for ``EarlyStopping`` and ``ModelCheckpoint``), and with the trainer's own numbers to the sinks, on the main
    process only. What is left at the end of training is written too, and the sinks are closed then. Steps are
    ``trainer.global_step``: optimizer steps done. Works with ``lightning`` and ``pytorch_lightning``. Nothing raises
    into training.

    Args:
        names: of the slices.
        every_n_steps: None is the trainer's ``log_every_n_steps``.
        **options: those of :class:`pyrlstats.integrations.reporter.Reporter`.
    """

    def __init__(self, names: Any, *, every_n_steps: int | None = None, **options: Any) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"every_n_steps must be positive or None, got {every_n_steps}")
        self.reporter = Reporter(names, **options)
        self._every_n_steps = every_n_steps
        self._reported = 0  # the step of the last report
        self._logging = Guard("logging log-ratios")

    @property
    def failures(self) -> dict[str, int]:
        """What failed -> how often, on this rank; of the sinks too."""
        return self.reporter.failures | {self._logging.what: self._logging.failures}

    def update(self, logp: Any, old_logp: Any, masks: Masks = None, **others: Any) -> None:
        """Count one micro-batch; arguments as :meth:`pyrlstats.SliceAccumulator.update`. Never raises."""
        self.reporter.update(logp, old_logp, masks, **others)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.reporter.reset()
        self._reported = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        every = self._every_n_steps or trainer.log_every_n_steps
        # several optimizers move the step by more than one; it stands still while gradients accumulate
        if every and trainer.global_step // every > self._reported // every:
            numbers = self._report(trainer)
            floats = {key: float(value) for key, value in numbers.items()}
            self._logging(pl_module.log_dict, floats, on_step=True, on_epoch=False, logger=False)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_step != self._reported:  # on all ranks alike
            self._report(trainer)
        self.reporter.close()

    def _report(self, trainer: Any) -> dict[str, float]:
        self._reported = step = trainer.global_step
        is_main = trainer.is_global_zero
        own = self._logging(self._numbers_of, trainer) if is_main else None
        numbers = self.reporter.report(step, is_main=is_main, scalars=own)
        for logger in trainer.loggers if numbers else ():
            self._logging(logger.log_metrics, numbers, step)
        return numbers

    def _numbers_of(self, trainer: Any) -> dict[str, float]:
        """What the module logged itself, up to this batch."""
        prefix = self.reporter.prefix
        return {key: float(value) for key, value in trainer.callback_metrics.items() if not key.startswith(prefix)}
