"""What every backend receives: one batch of tokens that has passed the input gate."""

from __future__ import annotations

from dataclasses import dataclass

from pyrlstats.state import Array


@dataclass(frozen=True)
class Batch:
    """Checked tokens of one call, all on one device, all arrays of one kind (NumPy or torch).

    Attributes:
        logp, old_logp: float32, bfloat16, float16 or float64, one shape, any strides, detached.
        masks: one per slice, each expanded (stride 0) to that shape: bool, integer or float, non-zero = member.
            ``None`` with no ``slice_ids``: every token is a member of the only slice.
        slice_ids: integers expanded to that shape, instead of ``masks``: negative = in no slice,
            beyond the last slice = counted in ``n_out_of_range``.
        base_mask: ANDed into every slice, expanded to that shape; a token outside takes no part at all.
        advantages: floats expanded to that shape, where the group of policy clips is kept.
        boundaries: int64 (sequences + 1,), where sequences begin and end in the flattened tokens, ascending, where
            sequences are kept.
    """

    logp: Array
    old_logp: Array
    masks: tuple[Array, ...] | None
    slice_ids: Array | None
    base_mask: Array | None
    advantages: Array | None = None
    boundaries: Array | None = None
