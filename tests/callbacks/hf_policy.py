"""A tiny policy and a ``Trainer`` whose loss counts log-ratios with the callback and keeps what it saw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from pyrlstats.integrations.transformers import SliceCallback

NAMES = ["text", "post_tool"]


class Policy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(4, 16)

    def forward(self, x: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(self.head(x), -1)


class PolicyTrainer(Trainer):
    def __init__(self, *args: Any, callback: SliceCallback | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.callback = callback
        self.seen: list[Any] = []

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        logp = model(inputs["x"]).gather(-1, inputs["action"])
        masks = {"text": inputs["text"], "post_tool": ~inputs["text"]}
        loss = -(torch.exp(logp - inputs["old_logp"]) * inputs["advantage"]).mean()
        if model.training:
            if self.callback is not None:
                self.callback.update(logp, inputs["old_logp"], masks)
            arrays = {name: mask.numpy().copy() for name, mask in masks.items()}
            self.seen.append((logp.detach().numpy().copy(), inputs["old_logp"].numpy().copy(), arrays))
        return (loss, {"loss": loss, "logp": logp}) if return_outputs else loss


class Reporter(TrainerCallback):
    """Keeps what a reporting integration would send, as it comes."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))


def trainer(folder: Path, callback: SliceCallback | None, steps: int = 5, **options: Any) -> PolicyTrainer:
    torch.manual_seed(0)
    rng = torch.Generator().manual_seed(1)
    data = [
        {
            "x": torch.randn(4, generator=rng),
            "action": torch.randint(16, (6,), generator=rng),
            "old_logp": torch.randn(6, generator=rng) * 0.3 - 2.8,
            "text": torch.rand(6, generator=rng) < 0.4,
            "advantage": torch.randn(1, generator=rng),
            "labels": torch.zeros(1),
        }
        for _ in range(64)
    ]
    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        max_steps=steps,
        logging_steps=2,
        per_device_train_batch_size=4,
        learning_rate=0.05,
        report_to=[],
        save_strategy="no",
        remove_unused_columns=False,
        label_names=["labels"],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **options,
    )
    reporter = Reporter()
    made = PolicyTrainer(
        Policy(), arguments, train_dataset=data, eval_dataset=data[:8], callback=callback, callbacks=[reporter]
    )
    made.sent = reporter
    return made
