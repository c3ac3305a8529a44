"""``slice_stats``: one call, one result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyrlstats import _dispatch
from pyrlstats._inputs import Masks, as_ids, device_of, gate, resolve_names
from pyrlstats.groups.inputs import with_groups
from pyrlstats.groups.options import Options, groups_of
from pyrlstats.layout import Layout, check_clip, check_layout
from pyrlstats.slice_stats import SliceStats
from pyrlstats.state import Group, State

_DEFAULT_LAYOUT = Layout()
_DUAL_CLIP = 3.0


def slice_stats(
    logp: Any,
    old_logp: Any,
    masks: Masks = None,
    *,
    slice_ids: Any = None,
    names: Sequence[str] | None = None,
    mask: Any = None,
    clip: tuple[float, float] = (0.2, 0.2),
    layout: Layout = _DEFAULT_LAYOUT,
    num_threads: int | None = None,
    advantages: Any = None,
    dual_clip: float = _DUAL_CLIP,
    sequences: bool = False,
    cu_seqlens: Any = None,
    truncate: tuple[float, float] | None = None,
    entropy: bool = False,
    probabilities: bool = False,
) -> SliceStats:
    """Distribution statistics of the per-token log-ratio, slice by slice, in one pass over the tokens.

    Samples come from the old (behaviour) policy: ``x = logp - old_logp`` in nats, ratio ``w = exp(x)``.

    Args:
        logp, old_logp: log-probabilities (nats) under the new and the old policy: torch tensors, NumPy arrays or
            DLPack objects of one shape, any shape and strides; float32, bfloat16, float16 or float64, the two
            may differ. Both are widened to float32 before the subtraction (float64 is subtracted in float64 and
            rounded once). They are detached; no graph is kept.
        masks: None (one slice "all" of every token), one array (the slice "all"), a mapping name -> array, a
            family of :mod:`pyrlstats.slices`, or a sequence of arrays with ``names``. bool, integer or float;
            non-zero, NaN included, is a member. Shapes broadcast to logp's. Slices may overlap. A value outside
            never takes part in arithmetic.
        slice_ids: instead of ``masks``, one integer a token: the index into ``names``; negative is no slice,
            too large is counted in ``n_out_of_range``.
        names: slice names, distinct, not empty, without "/".
        mask: ANDed into every slice, such as a response mask; broadcasts to logp's shape.
        clip: (low, high), distances from 1: ratios outside [1 - low, 1 + high] are clipped; 0 < low < 1, high > 0.
        layout: bins of the histogram.
        num_threads: on the CPU, at most so many; None is ``torch.get_num_threads()`` for tensors, else the CPUs of
            this process. The same bits for any number.
        advantages: floats that broadcast to logp's shape; of one dimension beside logp of two, one a row. Adds
            what PPO clips by their sign, their own distribution and that of the updates w A (``stats.updates``).
        dual_clip: c of the dual clip, above 1: ratios above it are clipped where the advantage is negative.
        sequences: adds statistics over sequences (``stats.sequences``): the rows of logp, or those of ``cu_seqlens``.
        cu_seqlens: int (sequences + 1,), where sequences begin and end in packed tokens of shape [N] or [1, N];
            implies ``sequences``. Tokens beyond the last boundary belong to no sequence.
        truncate: (lo, hi), bounds of the ratio: adds means and effective sample sizes of clamped and masked weights.
        entropy: adds ``perplexity_ess_fraction``.
        probabilities: adds statistics of abs(exp(logp) - exp(old_logp)), and the correlation of the two.

    Returns:
        A mapping slice name -> statistics, on the inputs' device (NumPy in, NumPy out). Does not sync. NaN and
        infinite x are counted and excluded from everything else; a slice without finite tokens has NaN
        statistics and counts of 0.

    Raises:
        TypeError: not an array, or a dtype that is not accepted.
        ValueError: shapes, devices, names, clip or other options that do not fit.
    """
    checked_clip = check_clip(clip)
    groups: tuple[Group, ...] = ()
    if not (
        sequences is entropy is probabilities is False
        and advantages is cu_seqlens is truncate is None
        and dual_clip is _DUAL_CLIP
    ):
        kept = True if sequences is False and cu_seqlens is not None else sequences
        options = Options(kept, advantages is not None, dual_clip, truncate, entropy, probabilities)
        groups = groups_of(options, checked_clip)
    check_layout(layout)
    if num_threads is not None and (not isinstance(num_threads, int) or num_threads < 1):
        raise ValueError(f"num_threads must be a positive integer or None, got {num_threads!r}")
    masks, slice_ids, names = as_ids(masks, slice_ids, names)
    checked_names = resolve_names(masks, slice_ids, names)
    batch = gate(logp, old_logp, masks, slice_ids, mask, checked_names)
    if groups:
        batch = with_groups(batch, groups, advantages, cu_seqlens)
    state = State.empty(checked_names, layout, checked_clip, device_of(batch.logp), groups)
    _dispatch.accumulate(batch, state, num_threads)
    return SliceStats(state)
