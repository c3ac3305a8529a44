"""Flat keys taken apart again, for clients that have labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pyrlstats.results import Statistics


def labelled(
    stats: Mapping[str, Statistics[Any]], scalars: Mapping[str, float]
) -> Iterator[tuple[str, str | None, float]]:
    """(prefix + statistic, slice, value) of every scalar; the slice is None where the key names none."""
    known = {f"{prefix}{name}": (prefix, name) for prefix, one in stats.items() for name in one}
    for key, value in scalars.items():
        head, _, statistic = key.rpartition("/")
        if head in known:
            prefix, name = known[head]
            yield prefix + statistic, name, value
        else:
            yield key, None, value
