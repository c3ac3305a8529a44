"""NeMo-RL: raw sums among the metrics of a loss function, all of which its driver adds up."""

from __future__ import annotations

from typing import Any

from pyrlstats.integrations._pairs import PairAccumulator
from pyrlstats.integrations._summed import MicroBatchSums
from pyrlstats.slices import tool_slices

PAIRS = ("learner_vs_old", "learner_vs_sampler", "old_vs_sampler")


class WithSums:
    """A NeMo-RL loss function that returns raw sums beside the metrics of the one it wraps.

    The driver adds up every metric it does not know, over micro-batches and ranks: ratios of the reduced sums are the
    pooled statistics, also with sequence packing, where the loss is called once a sequence. Take them before logging,
    ``from_sums(metrics, "log_ratio/")``. ``learner`` are the log-probabilities of the forward pass, ``old`` is
    ``prev_logprobs``, ``sampler`` is ``generation_logprobs``. Slices by the holes of the mask: ``all``, ``text``,
    ``pre_tool`` and ``post_tool``. Reads the sums back once a call: one sync. The loss itself is not touched.

    Args:
        loss_fn: called with ``next_token_logprobs`` (B, S - 1) and ``data`` of (B, S), such as ``ClippedPGLossFn``.
        prefix: put before every key.
        clip: (low, high) of the ratio clip whose shares are counted.

    Attributes:
        metric_normalizations: the loss's own, where it has them, with every sum as ``NONE``: raw.
    """

    def __init__(self, loss_fn: Any, prefix: str = "log_ratio/", *, clip: tuple[float, float] = (0.2, 0.2)) -> None:
        self._loss_fn = loss_fn
        self._sums = MicroBatchSums("pyrlstats in NeMo-RL", PAIRS, prefix, clip)
        known = getattr(loss_fn, "metric_normalizations", None)
        if known:
            raw = type(next(iter(known.values())))("none")
            self.metric_normalizations = {**known, **dict.fromkeys(self._sums(lambda accumulator: None), raw)}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_loss_fn" not in vars(self):  # being unpickled, in a worker
            raise AttributeError(name)
        return getattr(self._loss_fn, name)

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        loss, metrics = self._loss_fn(*args, **kwargs)

        def count(accumulator: PairAccumulator) -> None:
            named = {**dict(zip(("next_token_logprobs", "data"), args, strict=False)), **kwargs}
            learner, data = named["next_token_logprobs"], named["data"]
            # position t of the data belongs to the token that position t - 1 predicts
            mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
            where = tool_slices(mask)
            columns = {"learner": learner}
            for column, key in (("old", "prev_logprobs"), ("sampler", "generation_logprobs")):
                if data.get(key) is not None:  # on-policy runs carry no prev_logprobs
                    columns[column] = data[key][:, 1:]
            for pair in PAIRS:
                new, old = pair.split("_vs_")
                if new in columns and old in columns:
                    accumulator.update(pair, columns[new], columns[old], where)

        return loss, {**metrics, **self._sums(count)}
