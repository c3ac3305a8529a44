"""What the monitor takes of the far tail: the figures of ``tail_shape``, always of one sample size."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from pyrlstats.monitor.records import decode_scalars, encode_scalars


class Tails(NamedTuple):
    """Figures of one step.

    Attributes:
        sample_size: tokens of the samples whose tail was looked at: k-hat compares with itself only at one.
        figures: as ``TailShape.to_dict`` gives them, ``slice/pareto_k`` and the others.
    """

    sample_size: int
    figures: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """As strict JSON values."""
        return {"sample_size": self.sample_size, **encode_scalars(self.figures)}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Tails:
        """What :meth:`to_json` gave.

        Raises:
            KeyError, TypeError, ValueError: something else.
        """
        figures = {name: value for name, value in fields.items() if name != "sample_size"}
        return cls(int(fields["sample_size"]), decode_scalars(figures))


def taken(tails: Any, slices: Collection[str] | None, sample_size: int | None) -> Tails:
    """The figures of a ``TailShape``, on the host.

    Args:
        tails: from ``pyrlstats.tails.tail_shape``.
        slices: those of the statistics of this step; None where there are none.
        sample_size: that of the steps before; None before the first.

    Raises:
        TypeError: something else.
        ValueError: no sample size, another one than before, or slices without statistics.
    """
    from pyrlstats.tails import TailShape

    if not isinstance(tails, TailShape):
        raise TypeError(f"tails must be what pyrlstats.tails.tail_shape returns, got {type(tails).__name__}")
    if tails.sample_size is None:
        raise ValueError("k-hat grows with the number of tokens: give tail_shape one sample_size= for all steps")
    if sample_size is not None and tails.sample_size != sample_size:
        raise ValueError(f"tails must keep sample_size={sample_size}, got {tails.sample_size}: k-hat grows with it")
    unknown = [name for name in tails if slices is not None and name not in slices]
    if unknown:
        raise ValueError(f"tails must be of the slices of stats {list(slices or ())}, got {unknown} too")
    return Tails(tails.sample_size, tails.to_dict())
