"""How verl writes thresholds: ``2.0``, ``"2.0"``, or ``"0.5_2.0"``."""

from __future__ import annotations


def bounds(name: str, spec: str | float) -> tuple[float | None, float]:
    """(lower, upper) of verl's ``"lower_upper"``; lower is None of a single number.

    Raises:
        ValueError: not a number or two, or not 0 < lower <= upper.
    """
    try:
        parts = [float(part) for part in str(spec).split("_", 1)]
    except ValueError:
        raise ValueError(f"{name} must be a number or 'lower_upper', got {spec!r}") from None
    if not 0.0 < parts[0] <= parts[-1] or isinstance(spec, bool):
        raise ValueError(f"{name} must be positive, the lower bound not above the upper one, got {spec!r}")
    return (parts[0] if len(parts) == 2 else None), parts[-1]
