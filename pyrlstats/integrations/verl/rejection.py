"""What verl logs about rejection sampling: the divergences that it thresholds, and the shares that it rejects."""

from __future__ import annotations

import math

import torch

from pyrlstats.integrations.verl.members import Members, largest, mean, sample_std, smallest, std
from pyrlstats.integrations.verl.thresholds import bounds

OPTIONS = (
    *("token_k1", "token_k2", "token_k3"),
    *("seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3"),
    *("seq_max_k2", "seq_max_k3"),
)


def metrics(members: Members, rollout_rs: str, threshold: str | float | None) -> dict[str, float]:
    """verl's ``rollout_rs_*``, for its options, separated by commas; a token must pass all of them.

    Raises:
        ValueError: an option that verl does not have, or thresholds that do not fit.
    """
    options = list(dict.fromkeys(option.strip() for option in rollout_rs.split(",") if option.strip()))
    unknown = [option for option in options if option not in OPTIONS]
    if unknown or not options:
        raise ValueError(f"rollout_rs must name some of {list(OPTIONS)}, got {rollout_rs!r}")
    result: dict[str, float] = {}
    kept = members.member
    for option, (low, high) in zip(options, _thresholds(options, threshold), strict=True):
        found, keep = _of_option(members, option, low, high)
        result |= {f"rollout_rs_{option}_{name}": value for name, value in found.items()}
        kept = kept & keep
    result["rollout_rs_masked_fraction"] = mean(~kept[members.member])
    result["rollout_rs_seq_masked_fraction"] = mean((members.member & ~kept).any(-1)[members.rows])
    return result


def _of_option(members: Members, option: str, low: float, high: float) -> tuple[dict[str, float], torch.Tensor]:
    """The metrics of one option, and the tokens (B, T) that it keeps."""
    level, _, kind = option.rpartition("_")
    tokens = _divergence(kind, members.x)
    if level == "token":
        of_rows = members.row_means(tokens)
        of_units, lengths = tokens[members.member], None
    else:
        of_rows = of_units = _of_sequences(level, members, tokens)
        lengths = members.lengths
    inside = (of_units >= low) & (of_units <= high)
    if level == "token":
        keep = (tokens >= low) & (tokens <= high)
    else:
        rows = torch.ones_like(members.rows)
        rows[members.rows] = inside
        keep = rows[:, None].expand_as(members.member)
    bounded_below = kind == "k1"
    found = {
        "mean": mean(of_units, lengths),
        "max": largest(of_units),
        "min": smallest(of_units),
        "fraction_high": mean(of_units > high),
        "fraction_low": mean(of_units < low) if bounded_below else 0.0,
        "std": std(of_units.clamp(low if bounded_below else 0.0, high), lengths),
        "seq_mean": mean(of_rows),
        "seq_std": sample_std(of_rows),
        "seq_max": largest(of_rows),
        "seq_min": smallest(of_rows),
        "seq_max_deviation": largest(of_rows.abs()),
        "seq_fraction_high": mean(of_rows > high),
        "masked_fraction": mean(~inside, lengths),
        "seq_masked_fraction": mean((members.member & ~keep).any(-1)[members.rows]),
    }
    if bounded_below:
        found["seq_fraction_low"] = mean(of_rows < low)
    return found, keep


def _divergence(kind: str, x: torch.Tensor) -> torch.Tensor:
    """k1, k2 or k3 of every token, float64 (B, T), nats."""
    x = x.double()
    if kind == "k1":
        return -x
    return x * x / 2.0 if kind == "k2" else torch.expm1(x) - x


def _of_sequences(level: str, members: Members, tokens: torch.Tensor) -> torch.Tensor:
    """Sum, mean or maximum over the members of each sequence that has any: float64 (R,)."""
    if level == "seq_sum":
        return members.row_sums(tokens)
    if level == "seq_mean":
        return members.row_means(tokens)
    return torch.where(members.member, tokens, -math.inf).amax(-1)[members.rows]


def _thresholds(options: list[str], threshold: str | float | None) -> list[tuple[float, float]]:
    """(low, high) of each option on its own scale: log of the ratio's bounds for k1, (-inf, upper) else."""
    name = "rollout_rs_threshold"
    if threshold is None:
        raise ValueError(f"{name} must be given with rollout_rs, got None")
    specs = [part.strip() for part in str(threshold).split(",") if part.strip()]
    specs = specs * len(options) if len(specs) == 1 else specs
    if len(specs) != len(options):
        raise ValueError(f"{name} must hold one number, or one for each of {options}, got {threshold!r}")
    found = []
    for option, spec in zip(options, specs, strict=True):
        lower, upper = bounds(name, spec)
        if option.endswith("k1"):
            found.append((math.log(lower if lower is not None else 1.0 / upper), math.log(upper)))
        elif lower is not None:
            raise ValueError(f"{name} of {option} must be one upper bound, got {spec!r}")
        else:
            found.append((-math.inf, upper))
    return found
