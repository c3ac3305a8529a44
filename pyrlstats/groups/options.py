"""Which groups a call or an accumulator keeps."""

from __future__ import annotations

from typing import NamedTuple

from pyrlstats.layout import Layout, check_dual_clip, check_truncate
from pyrlstats.state import Group

WIDE_LAYOUT = Layout(max_exp=40)  # sums over sequences, advantages: magnitudes up to 1.1e12

SEQUENCE_SUMS = "sequence_sums"
SEQUENCE_MEANS = "sequence_means"
LOG_PERPLEXITIES = "sequence_log_perplexities"
OLD_LOG_PERPLEXITIES = "sequence_old_log_perplexities"
LOG_PERPLEXITY_DIFFERENCES = "sequence_log_perplexity_differences"
# of the quantities of a sequence, in the order in which groups/sequences.py makes them
SEQUENCE_QUANTITIES = (
    SEQUENCE_SUMS,
    SEQUENCE_MEANS,
    LOG_PERPLEXITIES,
    OLD_LOG_PERPLEXITIES,
    LOG_PERPLEXITY_DIFFERENCES,
)


class Options(NamedTuple):
    """What is asked for beside the core; the arguments of ``slice_stats`` and ``SliceAccumulator``."""

    sequences: bool = False
    advantages: bool = False
    dual_clip: float = 3.0
    truncate: tuple[float, float] | None = None
    entropy: bool = False
    probabilities: bool = False


def groups_of(options: Options, clip: tuple[float, float]) -> tuple[Group, ...]:
    """The groups of a state, checked.

    Raises:
        TypeError: a switch that is no bool.
        ValueError: dual_clip or truncate out of range.
    """
    for name in ("sequences", "advantages", "entropy", "probabilities"):
        if not isinstance(getattr(options, name), bool):
            raise TypeError(f"{name} must be True or False, got {getattr(options, name)!r}")
    narrow = Layout(0, -1, 0)  # of rows without a histogram
    groups = []
    if options.entropy:
        groups.append(Group("entropy", "entropy", narrow))
    if options.probabilities:
        groups.append(Group("probabilities", "probabilities", narrow))
    if options.truncate is not None:
        groups.append(Group("truncation", "truncation", narrow, check_truncate(options.truncate)))
    dual_clip = check_dual_clip(options.dual_clip)
    if options.advantages:
        groups.append(Group("policy_clip", "policy_clip", narrow, (*clip, dual_clip)))
        groups += [Group(name, "core", WIDE_LAYOUT, clip) for name in ("advantages", "updates")]
    if options.sequences:
        groups.append(Group("sequences", "sequences", narrow))
        groups += [Group(name, "core", WIDE_LAYOUT, clip) for name in SEQUENCE_QUANTITIES]
    return tuple(groups)
