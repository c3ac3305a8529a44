"""A tiny policy as a ``LightningModule`` that counts log-ratios with the callback and keeps what it saw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

try:
    import lightning.pytorch as pl
except ImportError:
    import pytorch_lightning as pl

NAMES = ["text", "post_tool"]


def module_of(library: Any) -> type:
    """The module for ``lightning.pytorch`` or ``pytorch_lightning``."""

    class Policy(library.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self, callback: Any) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.head = torch.nn.Linear(4, 16)
            self.callback = callback
            self.seen: list[Any] = []
            self.losses: list[float] = []

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            x, action, old_logp, text, advantage = batch
            logp = torch.log_softmax(self.head(x), -1).gather(-1, action)
            masks = {"text": text, "post_tool": ~text}
            if self.callback is not None:
                self.callback.update(logp, old_logp, masks)
            arrays = {name: mask.numpy().copy() for name, mask in masks.items()}
            self.seen.append((logp.detach().numpy().copy(), old_logp.numpy().copy(), arrays))
            loss = -(torch.exp(logp - old_logp) * advantage).mean()
            self.log("policy_loss", loss)
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.5)

        def train_dataloader(self) -> Any:
            rng = torch.Generator().manual_seed(1)
            columns = (
                torch.randn(96, 4, generator=rng),
                torch.randint(16, (96, 6), generator=rng),
                torch.randn(96, 6, generator=rng) * 0.3 - 2.8,
                torch.rand(96, 6, generator=rng) < 0.4,
                torch.randn(96, 1, generator=rng),
            )
            return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*columns), batch_size=4)

    return Policy


def training(
    folder: Path, callback: Any, accumulation: int, library: Any = pl, callbacks: Any = (), **options: Any
) -> tuple[Any, Any]:
    """A ``Trainer`` of five optimizer steps, and its module."""
    given = [*callbacks] if callback is None else [callback, *callbacks]
    settings = {
        "accelerator": "cpu",
        "max_steps": 5,
        "log_every_n_steps": 2,
        "accumulate_grad_batches": accumulation,
        "callbacks": given,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": str(folder),
    }
    return library.Trainer(**(settings | options)), module_of(library)(callback)
