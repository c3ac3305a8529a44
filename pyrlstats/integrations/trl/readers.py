"""Where each trainer has its log-probabilities: the hooks that read them off as they pass by.

A reader wraps the methods of one trainer, with ``ages`` also those that tell staleness where that costs something. It
calls ``deliver(read)`` once a micro-batch, after the loss has been computed; ``read()`` makes the :class:`Tokens`.
Whatever the trainer's own methods raise goes through untouched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from pyrlstats.integrations.trl.ages import SampleAges
from pyrlstats.integrations.trl.families import ALL
from pyrlstats.integrations.trl.hooks import FirstResult, Hooks
from pyrlstats.integrations.trl.tokens import RATIOS, Tokens
from pyrlstats.slices import Slices
from pyrlstats.state import Array, State

Deliver = Callable[[Callable[[], Tokens]], None]
Guard = Callable[..., Any]  # guard("do something", function, *arguments)

OLD_LOGPS = "pyrlstats_old_per_token_logps"  # travels with RLOO's batch through its shuffle and split

LOGPS, GENERATE, LOSS = "_get_per_token_logps_and_entropies", "_generate_and_score_completions", "_compute_loss"

_NO_OLD = (
    "pyrlstats: the trainer computes no old log-probabilities, for it uses each generated batch within one optimizer "
    "step: learner_vs_old is 1 by construction and old_vs_sampler is learner_vs_sampler. Both are left out. "
    "To see a ratio, set steps_per_generation > gradient_accumulation_steps, or num_iterations > 1, or use_vllm."
)
_NO_SAMPLER = (
    "pyrlstats: the batch holds no log-probabilities of the sampler (vLLM, or a rollout_func that returns them): "
    "learner_vs_sampler and old_vs_sampler are left out."
)


class GRPOReader:
    """GRPOTrainer and what derives from it: padded rows ``[B, T]``.

    Attributes:
        ratios: that can exist.
        families, known_families: of slices, by default and at most.
        by_sequence: whether the loss is of ratios of whole sequences.
        methods: of the trainer, that it hooks.
        absent: whose log-probabilities may be absent -> how to say why.
    """

    ratios = tuple(RATIOS)
    by_sequence = False
    families: tuple[str, ...] = ("tool", "turn", "staleness")
    known_families: tuple[str, ...] = families
    methods = (LOGPS, GENERATE, LOSS)
    absent: Mapping[str, tuple[int, str]] = MappingProxyType(
        {"old": (logging.WARNING, _NO_OLD), "sampler": (logging.INFO, _NO_SAMPLER)}
    )

    def __init__(self, trainer: Any, hooks: Hooks, deliver: Deliver, guard: Guard, ages: bool) -> None:
        self._trainer, self._deliver, self._guard = trainer, deliver, guard
        self._learner, self._old = FirstResult(), FirstResult()
        self._generated_at: int | None = None
        hooks.wrap(LOGPS, self._logps)
        hooks.wrap(GENERATE, self._generate)
        hooks.wrap(LOSS, self._loss)

    def _logps(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def logps(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._guard("read log-probabilities", self._offer, result)
            return result

        return logps

    def _offer(self, result: Any) -> None:
        values = result[0].detach()
        self._learner.offer(values)
        self._old.offer(values)

    def _generate(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def generate(*args: Any, **kwargs: Any) -> Any:
            if self._trainer.model.training:  # evaluation uses what it generates at once
                self._generated_at = self._trainer.state.global_step
            with self._old.opened():
                result = original(*args, **kwargs)
            self._guard("keep old log-probabilities", self._keep_old, result, self._old.taken())
            return result

        return generate

    def _keep_old(self, batch: dict[str, Any], old: Array | None) -> None:
        """GRPO's batch holds them itself, where it needs them."""

    def _loss(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def loss(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            with self._learner.opened():
                result = original(model, inputs, *args, **kwargs)
            learner = self._learner.taken()
            self._deliver(lambda: self._tokens(learner, inputs))
            return result

        return loss

    def _tokens(self, learner: Array | None, inputs: Mapping[str, Any]) -> Tokens:
        if learner is None:
            raise RuntimeError(f"this trainer's {LOSS} did not call {LOGPS}: its log-probabilities cannot be read")
        response = inputs["completion_mask"]
        model = inputs.get("tool_mask", response)
        logps = {"learner": learner, "old": self._old_of(inputs), "sampler": inputs.get("sampling_per_token_logps")}
        return Tokens(
            logps={whose: values for whose, values in logps.items() if values is not None},
            mask=response if model is response else response * model,
            along=lambda builder: builder(model, response_mask=response),
            age=self._age(),
            advantages=inputs["advantages"],
            cu_seqlens=None,
            inputs=inputs,
        )

    def _old_of(self, inputs: Mapping[str, Any]) -> Array | None:
        return inputs.get("old_per_token_logps")

    @staticmethod
    def correct(state: State) -> None:
        """Every row of a batch is a completion: nothing to correct."""

    def _age(self) -> int | None:
        if not self._trainer.model.training:
            return 0
        return None if self._generated_at is None else self._trainer.state.global_step - self._generated_at


class RLOOReader(GRPOReader):
    """RLOOTrainer: its loss gets the old log-probabilities summed up by row; here their tokens travel along."""

    ratios = ("learner_vs_old",)
    by_sequence = True
    families = known_families = ("staleness",)
    absent: Mapping[str, tuple[int, str]] = MappingProxyType({})

    def _keep_old(self, batch: dict[str, Any], old: Array | None) -> None:
        if old is None or old.shape != batch["completion_ids"].shape:
            raise RuntimeError(f"this trainer's {GENERATE} did not compute old log-probabilities per token")
        batch[OLD_LOGPS] = old

    def _old_of(self, inputs: Mapping[str, Any]) -> Array | None:
        return inputs.get(OLD_LOGPS)


class AsyncGRPOReader:
    """AsyncGRPOTrainer: terms of the loss ``[1, M]``, each pointing at the position of a packed row it is read off."""

    ratios = ("learner_vs_sampler",)
    by_sequence = False
    families = ("tool", "turn")
    known_families = (*families, "staleness")
    methods = ("compute_loss",)
    absent: Mapping[str, tuple[int, str]] = MappingProxyType({})

    def __init__(self, trainer: Any, hooks: Hooks, deliver: Deliver, guard: Guard, ages: bool) -> None:
        self._deliver, self._guard = deliver, guard
        if ages:
            SampleAges(trainer, hooks, guard)
        hooks.wrap("compute_loss", self._loss)

    @staticmethod
    def correct(state: State) -> None:
        """Take out the completions that :func:`_boundaries` has made up: those without a term, in any slice."""
        if any(group.name == "sequences" for group in state.groups):
            empty = state.group("sequences").count("n_empty")
            empty -= empty[state.names.index(ALL)]

    def _loss(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def loss(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            forward = _Listening(model, self._guard)
            result = original(forward, inputs, *args, **kwargs)
            self._deliver(lambda: self._tokens(forward.heard.taken(), inputs))
            return result

        return loss

    def _tokens(self, learner: Array | None, inputs: Mapping[str, Any]) -> Tokens:
        if learner is None:
            raise RuntimeError("the model's output holds no log_probs: its log-probabilities cannot be read")
        term = inputs["token_index"]  # -1 is padding, on the right as that of the row
        where, is_term = term.clamp(min=0), term >= 0
        return Tokens(
            logps={
                "learner": learner.reshape(1, -1).gather(-1, where),
                "sampler": inputs["old_log_probs"],
            },
            mask=is_term,
            along=lambda builder: _along_terms(builder, is_term, inputs["position_ids"].gather(-1, where), inputs),
            age=SampleAges.of_terms(inputs),
            advantages=inputs["advantages"],
            cu_seqlens=_boundaries(inputs["segment_id"], is_term),
            inputs=inputs,
        )


def _along_terms(builder: Callable[..., Slices], is_term: Array, position: Array, inputs: Mapping[str, Any]) -> Slices:
    """Slices of the terms: where the positions of one completion leave a gap, there was a tool result.

    Each term gets a place before it that stands for the gap, so that a builder for packed batches sees it.
    """
    completion = inputs["segment_id"]
    begins = torch.ones_like(is_term)
    begins[..., 1:] = completion[..., 1:] != completion[..., :-1]
    gap = is_term & ~begins
    gap[..., 1:] &= position[..., 1:] != position[..., :-1] + 1
    nothing = torch.zeros_like(is_term)
    found = builder(
        torch.stack((nothing, is_term), -1).flatten(-2),
        torch.stack((gap, nothing), -1).flatten(-2),
        position_ids=~torch.stack((begins, nothing), -1).flatten(-2),  # 0 where a sequence begins
    )
    return Slices(found.ids[..., 1::2], found.names)


def _boundaries(completion: Array, is_term: Array) -> Array:
    """cu_seqlens (M + 1,) of the completions, whose number no host knows: the rest of them hold no term."""
    n_terms = is_term.shape[-1]
    ids = completion.masked_fill(~is_term, n_terms).reshape(-1)  # ascending; padding comes last
    return torch.searchsorted(ids, torch.arange(n_terms + 1, device=ids.device))


class _Listening:
    """A model that keeps the log-probabilities of its first output. Hooks on the module would make it recompile."""

    def __init__(self, model: Any, guard: Guard) -> None:
        self._model, self._guard = model, guard
        self.heard = FirstResult()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self._model(*args, **kwargs)
        self._guard("read log-probabilities", self._hear, outputs)
        return outputs

    def _hear(self, outputs: Any) -> None:
        with self.heard.opened():
            self.heard.offer(outputs.log_probs.detach())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


READERS: dict[str, Any] = {
    "GRPOTrainer": GRPOReader,
    "RLOOTrainer": RLOOReader,
    "AsyncGRPOTrainer": AsyncGRPOReader,
}


def reader_for(trainer: Any) -> Any:
    """The reader of the trainer's class, or of the nearest class that it derives from.

    Raises:
        TypeError: another trainer, or one of a release whose methods have other names.
    """
    for ancestor in type(trainer).__mro__:
        reader = READERS.get(ancestor.__name__)
        if reader is None:
            continue
        missing = [name for name in (*reader.methods, "log") if not callable(getattr(trainer, name, None))]
        if missing:
            raise TypeError(
                f"this {ancestor.__name__} has no {', '.join(missing)}: its release of TRL is not supported; "
                "docs/trl.md names those that are"
            )
        return reader
    known = ", ".join(READERS)
    raise TypeError(f"trainer must be one of TRL's {known}, or derive from one, got {type(trainer).__name__}")
