"""How old AsyncGRPO's samples are: from the queue, where that is known, to the loss, where it is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from pyrlstats.integrations.trl.hooks import Hooks
from pyrlstats.state import Array

_KEY = "pyrlstats_ages"

Guard = Callable[..., Any]


class _Aged(np.ndarray):
    """The ids of a sample, which TRL hands on by reference, with the sample's age."""

    pyrlstats_age: int


class SampleAges:
    """Adds the ages of a packed row's completions to the batch that the main process makes.

    The age of a sample is what TRL logs as ``sample/staleness``: policy versions between the one that wrote it and the
    one that is live when it is taken from the queue. With several processes the tensor is one more that accelerate
    broadcasts with each batch.
    """

    def __init__(self, trainer: Any, hooks: Hooks, guard: Guard) -> None:
        self._trainer, self._hooks, self._guard = trainer, hooks, guard
        if trainer.accelerator.is_main_process:
            hooks.wrap("get_train_dataloader", self._dataloader)
            guard("watch the queue of samples", self._watch)

    def _watch(self) -> None:
        self._hooks.on(self._trainer.rollout_queue).wrap("get", self._get)

    @staticmethod
    def of_terms(inputs: Mapping[str, Any]) -> Array | None:
        """The age of each term of the loss, -1 where unknown; None where the batch holds none."""
        ages = inputs.get(_KEY)
        return None if ages is None else ages.gather(-1, inputs["segment_id"])

    def _get(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get(*args: Any, **kwargs: Any) -> Any:
            sample = original(*args, **kwargs)
            self._guard("read the age of a sample", self._tag, sample)
            return sample

        return get

    def _tag(self, sample: Any) -> None:
        ids = np.asarray(sample.input_ids).view(_Aged)
        ids.pyrlstats_age = self._trainer.model_version - sample.model_version
        sample.input_ids = ids

    def _dataloader(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_train_dataloader(*args: Any, **kwargs: Any) -> Any:
            dataloader = original(*args, **kwargs)
            self._guard("follow the samples into the batch", self._follow, dataloader)
            return dataloader

        return get_train_dataloader

    def _follow(self, dataloader: Any) -> None:
        collator = getattr(dataloader, "base_dataloader", dataloader).collate_fn
        self._hooks.on(collator).wrap("torch_call", self._collate)

    def _collate(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def torch_call(examples: Any) -> Any:
            batch = original(examples)
            ages = self._guard("put the ages of samples into the batch", _ages_of, *examples)
            # the key is always there: accelerate's broadcast must find the same tensors at every batch
            batch[_KEY] = torch.full((len(examples[0]), 1), -1) if ages is None else ages
            return batch

        return torch_call


def _ages_of(rows: Any) -> torch.Tensor:
    """int64 (rows, most completions of a row), -1 beyond."""
    ages = [[getattr(sample["input_ids"], "pyrlstats_age", -1) for sample in row.samples] for row in rows]
    most = max(map(len, ages))
    return torch.tensor([[*one, *[-1] * (most - len(one))] for one in ages])
