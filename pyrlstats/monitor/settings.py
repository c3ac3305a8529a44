"""What decides a monitor's alarms."""

from __future__ import annotations

from dataclasses import dataclass

from pyrlstats.monitor.history import DEPTH


@dataclass(frozen=True)
class Settings:
    """Checked at once.

    Attributes:
        baseline: observed steps with statistics that are frozen as the baseline, 20 to 512.
        skip: observed steps with statistics before them that count for nothing.
        schedule: names of the scalar that is the learning rate; while it rises the baseline does not begin.
        false_warnings, false_stops: chance that growth is reported in 2,000 steps of a stationary run.

    Raises:
        ValueError: values outside these ranges.
    """

    baseline: int = 100
    skip: int = 0
    schedule: tuple[str, ...] = ("learning_rate", "lr")
    false_warnings: float = 0.03
    false_stops: float = 0.005

    def __post_init__(self) -> None:
        if not 20 <= self.baseline <= DEPTH:
            raise ValueError(
                f"baseline must lie in 20 to {DEPTH} steps, got {self.baseline}: with fewer the noise is not known"
            )
        if self.skip < 0:
            raise ValueError(f"skip must be at least 0 steps, got {self.skip}")
        for name, rate in (("false_warnings", self.false_warnings), ("false_stops", self.false_stops)):
            if not 0.0 < rate <= 0.5:
                raise ValueError(f"{name} must satisfy 0 < {name} <= 0.5, got {rate}: a chance per 2,000 steps")
