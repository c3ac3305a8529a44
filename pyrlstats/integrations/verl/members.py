"""The tokens that verl's metrics are about, and means over tokens and over sequences that skip what is not there."""

from __future__ import annotations

import math

import torch


def widened(logp: torch.Tensor) -> torch.Tensor:
    """bfloat16 and float16 as float32: log-probabilities are subtracted after widening."""
    logp = logp.detach()
    return logp if logp.dtype == torch.float64 else logp.float()


class Members:
    """Tokens under the mask with a finite log-ratio, and the sequences that have any.

    Attributes:
        x: float (B, T), old_log_prob - rollout_log_prob in nats; 0 where a token is no member.
        member: bool (B, T).
        rows: bool (B,), sequences with a member.
        lengths: float64 (R,), members of each such sequence.
        n_non_finite: tokens under the mask whose log-ratio is NaN or infinite.
    """

    def __init__(self, old_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, response_mask: torch.Tensor) -> None:
        shape = tuple(old_log_prob.shape)
        for name, tensor in (("rollout_log_prob", rollout_log_prob), ("response_mask", response_mask)):
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name} must have old_log_prob's shape {shape}, got {tuple(tensor.shape)}")
        if len(shape) != 2:
            raise ValueError(f"old_log_prob must have the shape (B, T), got {shape}")
        x = widened(old_log_prob) - widened(rollout_log_prob)
        chosen, finite = response_mask.to(x.device) != 0, x.isfinite()
        self.member = chosen & finite
        self.n_non_finite = int((chosen & ~finite).sum())
        self.x = torch.where(self.member, x, 0.0)
        lengths = self.member.sum(-1)
        self.rows = lengths > 0
        self.lengths = lengths[self.rows].double()

    def row_sums(self, values: torch.Tensor) -> torch.Tensor:
        """Sums over the members of each sequence that has any: float64 (R,)."""
        return torch.where(self.member, values, 0.0).sum(-1, dtype=torch.float64)[self.rows]

    def row_means(self, values: torch.Tensor) -> torch.Tensor:
        """Means over the members of each sequence that has any: float64 (R,)."""
        return self.row_sums(values) / self.lengths


def mean(values: torch.Tensor, weights: torch.Tensor | None = None) -> float:
    """Mean of float64 or bool (N,), weighted or not; NaN of nothing."""
    values = values.double()
    if weights is None:
        return float(values.mean()) if values.numel() else math.nan
    return float((values * weights).sum() / weights.sum())


def std(values: torch.Tensor, weights: torch.Tensor | None = None) -> float:
    """Population standard deviation of (N,), from deviations, so that nothing cancels; NaN of nothing."""
    return math.sqrt(mean((values.double() - mean(values, weights)) ** 2, weights))


def sample_std(values: torch.Tensor) -> float:
    """With N - 1, as torch.std; 0.0 of one value, NaN of none."""
    return float(values.double().std()) if values.numel() > 1 else 0.0 * mean(values)


def largest(values: torch.Tensor) -> float:
    """Maximum of (N,); NaN of nothing."""
    return float(values.max()) if values.numel() else math.nan


def smallest(values: torch.Tensor) -> float:
    """Minimum of (N,); NaN of nothing."""
    return float(values.min()) if values.numel() else math.nan
