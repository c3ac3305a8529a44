"""What the groups need of a call: advantages and the boundaries of sequences, checked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from pyrlstats._inputs import _FLOATS, _as_array, _broadcast, _check_dtype, _dtype_name, _on_common_ground
from pyrlstats._sequences import _boundaries, arange, running_max
from pyrlstats.backends.batch import Batch
from pyrlstats.state import Array, Group, namespace


def with_groups(batch: Batch, groups: tuple[Group, ...], advantages: Any, cu_seqlens: Any) -> Batch:
    """The batch with what its groups need.

    Raises:
        TypeError: advantages or cu_seqlens that are no arrays, or of a dtype that is not accepted.
        ValueError: given but not asked for, asked for but missing, or of shapes, devices or values that do not fit.
    """
    names = {group.name for group in groups}
    if ("advantages" in names) != (advantages is not None):
        raise ValueError(
            "advantages are needed: this accumulator was made with advantages=True"
            if advantages is None
            else "advantages were given but are not kept: make the accumulator with advantages=True"
        )
    if cu_seqlens is not None and "sequences" not in names:
        raise ValueError("cu_seqlens was given but sequences are not kept: make the accumulator with sequences=True")
    if advantages is not None:
        batch = replace(batch, advantages=_advantages(advantages, batch.logp))
    if "sequences" in names:
        batch = replace(batch, boundaries=_ends(cu_seqlens, batch.logp))
    return batch


def _advantages(advantages: Any, logp: Array) -> Array:
    array = _as_array("advantages", advantages)
    _check_dtype("advantages", array, _FLOATS)
    if isinstance(logp, np.ndarray) and not isinstance(array, np.ndarray):
        if array.device.type != "cpu":
            raise ValueError(
                f"advantages must be on the CPU beside NumPy logp, got {array.device}: move it with .cpu()"
            )
        array = (array.float() if _dtype_name(array.dtype) == "bfloat16" else array).numpy()
    array = _on_common_ground({"logp": logp, "advantages": array})["advantages"]
    shape = tuple(logp.shape)
    if array.ndim == 1 and len(shape) == 2:
        if array.shape[0] != shape[0]:
            raise ValueError(
                f"advantages of one dimension hold one value a row: {shape[0]} are wanted for logp's shape {shape}, "
                f"got {array.shape[0]}"
            )
        array = array[:, None]
    return _broadcast("advantages", array, shape)


def _ends(cu_seqlens: Any, logp: Array) -> Array:
    """Boundaries in the flattened tokens: those given, or those of the rows."""
    n = int(np.prod(logp.shape))
    if cu_seqlens is None:
        if logp.ndim < 2:
            raise ValueError(
                f"sequences need to be told apart in logp of shape {tuple(logp.shape)}: "
                "give cu_seqlens, or rows of shape [sequences, tokens]"
            )
        rows = n // logp.shape[-1] if logp.shape[-1] else int(np.prod(logp.shape[:-1]))
        return arange(rows + 1, logp) * logp.shape[-1]
    if tuple(logp.shape) not in ((n,), (1, n)):
        raise ValueError(f"cu_seqlens needs packed tokens of shape [N] or [1, N], got {tuple(logp.shape)}")
    if isinstance(cu_seqlens, (list, tuple, np.ndarray)):
        try:
            host = np.asarray(cu_seqlens)
        except ValueError as error:
            raise ValueError(f"cu_seqlens must hold one integer a boundary: {error}") from error
        if host.size and host.dtype.kind not in "iu":
            raise TypeError(f"cu_seqlens must hold integers, got {host.dtype}: convert it")
        if host.ndim == 1 and host.size and (host.min() < 0 or host.max() > n or (np.diff(host) < 0).any()):
            raise ValueError(
                f"cu_seqlens must ascend and lie in 0 to the number of tokens, {n}, got {host.tolist()[:8]}"
            )
    ends = _boundaries(cu_seqlens, logp)
    if ends.ndim != 1 or not ends.shape[0]:
        raise ValueError(f"cu_seqlens must have shape [sequences + 1], got {tuple(ends.shape)}")
    # on a device they cannot be looked at without a sync: whatever they are, they stay inside the tokens
    return running_max(namespace(ends).clip(ends, 0, n))
