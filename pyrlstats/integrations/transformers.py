"""Hugging Face's ``Trainer``: a callback that fills its logs (extra ``pyrlstats[transformers]``)."""

from __future__ import annotations

from typing import Any

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError("SliceCallback needs transformers: pip install 'pyrlstats[transformers]'") from error

from pyrlstats._inputs import Masks
from pyrlstats.integrations.reporter import Reporter


class SliceCallback(TrainerCallback):  # type: ignore[misc]
    """Log-ratio statistics at every log of a ``Trainer``, over all ranks and micro-batches since the log before.

    Your loss calls :meth:`update`; :meth:`attach` puts the callback before those that report, so that W&B,
    TensorBoard, trackio and MLflow see our keys among the ``logs``, and ``trainer.state.log_history`` keeps them.
    What is left at the end of training is written to the sinks, which are closed then. Nothing raises into training.

    The arguments are those of :class:`pyrlstats.integrations.reporter.Reporter`. Sinks get the trainer's own numbers
    too, and are filled on the main process only.
    """

    def __init__(self, names: Any, **options: Any) -> None:
        self.reporter = Reporter(names, **options)
        self._reported = 0  # the step of the last report

    @property
    def failures(self) -> dict[str, int]:
        """What failed -> how often, on this rank; of the sinks too."""
        return self.reporter.failures

    def attach(self, trainer: Any) -> SliceCallback:
        """Add the callback to a trainer, before those that report."""
        callbacks = trainer.callback_handler.callbacks
        if self in callbacks:
            callbacks.remove(self)
        callbacks.insert(0, self)
        return self

    def update(self, logp: Any, old_logp: Any, masks: Masks = None, **others: Any) -> None:
        """Count one micro-batch; arguments as :meth:`pyrlstats.SliceAccumulator.update`. Never raises.

        Call it in training only (``if model.training``): ``compute_loss`` runs in evaluation too.
        """
        self.reporter.update(logp, old_logp, masks, **others)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.reporter.reset()
        self._reported = state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        # evaluations, the summary at the end and logs of the user's come here too, and do not have it
        if logs is None or "loss" not in logs:
            return
        self._reported = state.global_step
        numbers = self.reporter.report(state.global_step, is_main=state.is_world_process_zero, scalars=logs)
        logs.update(numbers)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(numbers)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step != self._reported:  # on all ranks alike
            self._reported = state.global_step
            self.reporter.report(state.global_step, is_main=state.is_world_process_zero)
        self.reporter.close()
