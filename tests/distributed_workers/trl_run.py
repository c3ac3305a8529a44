"""Small real runs of TRL's trainers that record, inside the trainer, what its loss is given. Also run by rank."""

from __future__ import annotations

import importlib
import math
import os
import queue
import sys
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import numpy as np
import torch
from transformers import AttentionInterface, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
example: Any = importlib.import_module("trl_grpo_tool")


class Records:
    """What a loss was given, by micro-batch, in the order of the run."""

    def __init__(self) -> None:
        self.batches: list[dict[str, Any]] = []
        self.logps: list[torch.Tensor] = []
        self.old_rows: dict[tuple[int, ...], torch.Tensor] = {}  # of the generated batch, by the ids of the row
        self.generated_at = 0

    def keep(self, trainer: Any, inputs: Any, loss: torch.Tensor) -> None:
        training = trainer.model.training
        given = {name: value.clone() for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        self.batches.append(
            {
                **given,
                "learner": self.logps[-1],
                "step": trainer.state.global_step,
                "age": trainer.state.global_step - self.generated_at if training else 0,
                "mode": "train" if training else "eval",
                "loss": loss.detach().clone(),
            }
        )


def row_ids(batch: Any) -> list[tuple[int, ...]]:
    return [tuple(ids) for ids in torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1).tolist()]


def spied(base: type, sampler_noise: float | None = None) -> type:
    """The trainer class, recording; with ``sampler_noise`` its generation returns log-probabilities as vLLM's does."""

    class Spied(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.records = Records()
            super().__init__(*args, **kwargs)

        def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
            result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            self.records.logps.append(result[0].detach().clone())
            return result

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            if self.model.training:
                self.records.generated_at = self.state.global_step
            start = len(self.records.logps)
            batch = super()._generate_and_score_completions(inputs)
            if len(self.records.logps) > start:
                self.records.old_rows = dict(zip(row_ids(batch), self.records.logps[start], strict=True))
            return batch

        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            loss = super()._compute_loss(model, inputs)
            self.records.keep(self, inputs, loss)
            if "old_logps" in inputs:  # RLOO has summed them up
                rows = torch.stack([self.records.old_rows[ids] for ids in row_ids(inputs)])
                self.records.batches[-1]["old_per_token_logps"] = rows
            return loss

        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            result = super()._generate_single_turn(*args, **kwargs)
            if sampler_noise is None:
                return result
            return result[0], [pretended_logps(ids, sampler_noise) for ids in result[0]]

    Spied.__name__ = f"Spied{base.__name__}"
    return Spied


def pretended_logps(ids: list[int], noise: float) -> list[float | None]:
    """Log-probabilities near those of a random model, different for each token; no random number is drawn.

    With infinite noise one token in ten has none, as vLLM says of NaN.
    """
    logps: list[float | None] = []
    for place, token in enumerate(ids):
        code = (31 * token + 17 * place) % 101
        logps.append(None if noise == math.inf and code < 10 else -3.8 + min(noise, 0.5) * (code / 50 - 1))
    return logps


def make_trainer(out: Any, *, kind: str = "grpo", sampler_noise: float | None = None, **options: Any) -> Any:
    """A recording trainer of a random model with the calculator of the example; ``options`` are its configuration's."""
    tokenizer = example.make_tokenizer()
    evaluated = options.get("eval_strategy", "no") != "no"
    rollout = options.pop("rollout_func", None)
    common: dict[str, Any] = {
        "output_dir": str(out),
        "report_to": [],
        "logging_steps": 1,
        "save_strategy": "no",
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 24,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        **options,
    }
    base, config, extra = GRPOTrainer, GRPOConfig, {"tools": [example.calculator]}
    if kind == "rloo":
        base, config, extra = RLOOTrainer, RLOOConfig, {}
    else:
        common["max_tool_calling_iterations"] = 3
    if rollout is not None:
        extra = {"rollout_func": rollout}
    model = example.make_model(tokenizer)
    if kind == "rloo":  # makes its reference model from a folder
        model.save_pretrained(Path(out) / "model")
        model = type(model).from_pretrained(Path(out) / "model")
    trainer = spied(base, sampler_noise)(
        model=model,
        processing_class=tokenizer,
        reward_funcs=reward,
        train_dataset=example.make_dataset(),
        eval_dataset=example.make_dataset().select(range(4)) if evaluated else None,
        args=config(**common),
        **extra,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Spread over the completions of any group, so that there is always a gradient."""
    return [sum(ids) % 7 / 7 for ids in completion_ids]


# -- AsyncGRPO: its own loop, packing and loss; generation, weight transfer and the GPU's attention are replaced -----


def tree_attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    *,
    tree_kv_index: Any,
    tree_cu_seqlens_q: Any,
    tree_cu_seqlens_k: Any,
    scaling: float,
    **_: Any,
) -> Any:
    """What TRL asks of FlashAttention 3: each segment of the packed row sees the path that leads to it."""
    query, key, value = (one.transpose(1, 2)[0] for one in (query, key, value))
    repeats = query.shape[1] // key.shape[1]
    key, value = (one[tree_kv_index].repeat_interleave(repeats, 1) for one in (key, value))
    outputs = []
    queries, keys = tree_cu_seqlens_q.tolist(), tree_cu_seqlens_k.tolist()
    for q0, q1, k0, k1 in zip(queries[:-1], queries[1:], keys[:-1], keys[1:], strict=True):
        scores = torch.einsum("qhd,khd->hqk", query[q0:q1], key[k0:k1]) * scaling
        sees = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(k1 - k0 - (q1 - q0))
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~sees, -math.inf).softmax(-1), value[k0:k1]))
    return torch.cat(outputs)[None], None


PROMPT = [2, 4, 33, 42, 34, 3, 2, 5]
TOOL_RESULT = [3, 2, 6, 37, 3, 2, 5]


def rollout(group: int, which: int) -> tuple[list[int], list[int]]:
    """Ids and completion mask of a rollout with ``which`` tool results."""
    ids, mask = [*PROMPT], [0] * len(PROMPT)
    for turn in range(which + 1):
        words = [7 + (group + 3 * which + 5 * turn + i) % 25 for i in range(2 + turn)]
        result = TOOL_RESULT if turn < which else []
        ids += [*words, *result]
        mask += [1] * len(words) + [0] * len(result)
    return [*ids, 3], [*mask, 1]


class Worker:
    """Generates nothing: its queue holds rollouts of 24 groups of four, group by group 0 to 4 versions old."""

    def __init__(self) -> None:
        self.rollout_buffer: Any = queue.Queue()
        self.metrics_queue: Any = queue.Queue()
        for group in range(24):
            for which in range(4):
                ids, mask = rollout(group, which)
                logps = [logp * one for logp, one in zip(pretended_logps(ids, 0.5), mask, strict=True)]
                self.rollout_buffer.put(
                    RolloutSample(
                        prompt=[],
                        completion=[],
                        input_ids=np.array(ids),
                        completion_mask=np.array(mask),
                        old_log_probs=np.array(logps, np.float32),
                        advantage=which - 1.5 + 10 * group,
                        model_version=1 - group % 5,
                        group_id=group,
                        metrics={"reward": float(which)},
                    )
                )

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def update_model_version(self, model_version: int) -> None: ...

    def check_health(self, stale_after_s: float) -> None: ...


class NoTransfer:
    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def send_weights(self, iterator: Any) -> None: ...

    def resume(self) -> None: ...

    def destroy(self) -> None: ...


class SpiedAsync(AsyncGRPOTrainer):
    """Records what its loss is given, and the logits of a forward of its own for each completion alone."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.records = Records()
        super().__init__(*args, **kwargs)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        def spy(*args: Any, **kwargs: Any) -> Any:
            outputs = model(*args, **kwargs)
            self.records.logps.append(outputs.log_probs.detach().clone())
            return outputs

        loss = super().compute_loss(spy, inputs, *args, **kwargs)
        self.records.keep(self, inputs, loss)
        return loss


def make_async_trainer(out: Path, monkeypatch: Any, **options: Any) -> Any:
    tokenizer = example.make_tokenizer()
    for one in (tokenizer, example.make_model(tokenizer)):
        one.save_pretrained(out / "model")
    monkeypatch.setattr(async_grpo_trainer, "VLLMClient", lambda *_: None)
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)  # asks the GPU its name
    trainer = SpiedAsync(
        model=str(out / "model"),
        reward_funcs=reward,
        train_dataset=example.make_dataset(),
        rollout_worker=Worker(),
        weight_transfer=NoTransfer(),
        args=AsyncGRPOConfig(
            str(out),
            per_device_train_batch_size=8,
            token_budget=0,
            max_staleness=10,
            weight_sync_steps=1000,  # the version stays 1, that of the first weights sent
            learning_rate=1e-2,
            report_to=[],
            logging_steps=1,
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            **options,
        ),
    )
    AttentionInterface.register(async_grpo_trainer.TREE_ATTENTION, tree_attention)
    trainer.remove_callback(PrinterCallback)
    return trainer


# -- two ranks --------------------------------------------------------------------------------------------------------


def fixed_rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """The same completions for a prompt and its repetition on any number of processes: nothing is sampled."""
    tokenizer = trainer.processing_class
    prompt_ids = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, tokenize=True)["input_ids"]
    completions, masks, logprobs = [], [], []
    for place, ids in enumerate(prompt_ids):
        first, which = sum(ids), place % trainer.num_generations
        model_ids = [7 + (first + 3 * which + i) % 25 for i in range(2 + which)]
        tool = [3, 2, 6, 32 + which, 3, 2, 5] if which else []  # the first of a group calls no tool
        after = [33 + (first + i) % 10 for i in range(which)]
        completions.append([*model_ids, *tool, *after, 3])
        masks.append([1] * len(model_ids) + [0] * len(tool) + [1] * (len(after) + 1))
        logps = pretended_logps(completions[-1], 0.3)
        logprobs.append([logp * mask for logp, mask in zip(logps, masks[-1], strict=True)])
    return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": logprobs, "env_mask": masks}


class PerLog(TrainerCallback):
    """Collectives, and copies of our states to the host, between the logs of training steps."""

    COLLECTIVES = (
        *("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "broadcast", "broadcast_object_list"),
        *("all_gather", "all_gather_into_tensor", "all_gather_object", "gather", "gather_object", "scatter"),
        *("all_to_all", "barrier", "send", "recv"),
    )

    def __init__(self) -> None:
        self.counts = {"collectives": 0, "to_host": 0}
        self.steps: list[dict[str, int]] = []
        self._restore: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> PerLog:
        from pyrlstats.state import State

        for owner, names, what in (
            (torch.distributed, self.COLLECTIVES, "collectives"),
            (State, ["to_host"], "to_host"),
        ):
            for name in names:
                self._count(owner, name, what)
        return self

    def _count(self, owner: Any, name: str, what: str) -> None:
        original = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            if what == "collectives" or isinstance(args[0].buffer, torch.Tensor):  # NumPy memory is the host's
                self.counts[what] += 1
            return original(*args, **kwargs)

        setattr(owner, name, counted)
        self._restore.append((owner, name, original))

    def __exit__(self, *_: object) -> None:
        for owner, name, original in self._restore:
            setattr(owner, name, original)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs is not None and "loss" in logs:
            self.steps.append(dict(self.counts))
        self.counts.update(collectives=0, to_host=0)


def run(out: Any, attached: bool, per_device: int, **options: Any) -> dict[str, Any]:
    """Train for six steps, with every batch used twice, on the completions that do not depend on the processes."""
    from pyrlstats.integrations.trl import attach

    with PerLog() as per_log:
        trainer = make_trainer(
            out,
            rollout_func=fixed_rollout,
            per_device_train_batch_size=per_device,
            steps_per_generation=1,
            num_iterations=2,
            max_steps=6,
            optim="sgd",  # Adam would blow up the last digits, in which processes differ
            learning_rate=0.05,
            **options,
        )
        trainer.add_callback(per_log)
        handle = attach(trainer) if attached else None
        if attached and trainer.accelerator.is_main_process:
            trainer.log({"mine": 1.0})  # of one rank alone: must not wait for the others
        stats: list[Any] = []
        if handle is not None:
            handle._on_stats = lambda one, mode, step: stats.append(
                {ratio: each.state_dict() for ratio, each in one.items()}
            )
        trainer.train()
    return {
        "history": trainer.state.log_history,
        "batches": trainer.records.batches,
        "stats": stats,
        "per_log": per_log.steps,
        "failures": None if handle is None else handle.failures,
        "weights": {name: value.detach().clone() for name, value in trainer.model.state_dict().items()},
    }


def main() -> None:
    """``trl_run.py folder``, with the variables that torchrun sets: both runs of one rank, saved in the folder."""
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    results = {name: run(folder / name, name == "attached", per_device=4) for name in ("plain", "attached")}
    torch.save(results, folder / f"rank_{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
