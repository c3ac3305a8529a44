"""Results of log-ratios: ``SliceStats``, a mapping slice name -> view of its statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from pyrlstats import quantiles as _quantiles
from pyrlstats import stats as _stats
from pyrlstats.groups import entropy, policy_clip, probabilities, sequences, truncation
from pyrlstats.groups.options import (
    LOG_PERPLEXITIES,
    LOG_PERPLEXITY_DIFFERENCES,
    OLD_LOG_PERPLEXITIES,
    SEQUENCE_MEANS,
    SEQUENCE_SUMS,
)
from pyrlstats.results import OPTION_OF, Statistic, Statistics, View, percentile_name, scalars_of
from pyrlstats.state import Array, State

if TYPE_CHECKING:
    from pyrlstats.values import ValueStats

__all__ = ["ABS_QUANTILES", "QUANTILES", "SCALARS", "SliceStats", "SliceView", "percentile_name"]

QUANTILES = (0.001, 0.01, 0.5, 0.99, 0.999)
ABS_QUANTILES = (0.5, 0.99, 0.999, 0.9999)


def _of(group: str, function: Callable[[State], Array]) -> Statistic:
    """A statistic of a group's values instead of the log-ratios."""

    def evaluate(state: State) -> Array:
        return function(state.group(group))

    words = group.removeprefix("sequence_").replace("_", " ")
    evaluate.__doc__ = f"Of the {words}{' of sequences' * group.startswith('sequence_')}: {function.__doc__}"
    return Statistic(evaluate, group)


def _abs_quantile(q: float) -> Callable[[State], Array]:
    def evaluate(state: State) -> Array:
        return _quantiles.abs_quantile(state, q)

    evaluate.__doc__ = f"The {100 * q:g} % quantile of magnitudes."
    return evaluate


class SliceView(View):
    """The statistics of one slice, as 0-d values on the state's device; quantiles are of x, in nats.

    Counts are int64, everything else float64; NaN for a slice without finite tokens. Reading one does not sync
    (``float()``, ``print`` and ``bool`` of a GPU value do, as always in torch). Each name is defined, with
    formula, unit and source, by the function of the same name in :mod:`pyrlstats.stats`.
    """

    __slots__ = ()

    n_tokens = Statistic(_stats.n_tokens)
    n_finite = Statistic(_stats.n_finite)
    n_nan = Statistic(_stats.n_nan)
    n_pos_inf = Statistic(_stats.n_pos_inf)
    n_neg_inf = Statistic(_stats.n_neg_inf)
    n_zero = Statistic(_stats.n_zero)
    zero_fraction = Statistic(_stats.zero_fraction)
    log_ratio_mean = Statistic(_stats.log_ratio_mean)
    log_ratio_std = Statistic(_stats.log_ratio_std)
    log_ratio_min = Statistic(_stats.log_ratio_min)
    log_ratio_max = Statistic(_stats.log_ratio_max)
    log_ratio_abs_mean = Statistic(_stats.log_ratio_abs_mean)
    kl_k1 = Statistic(_stats.kl_k1)
    kl_k2 = Statistic(_stats.kl_k2)
    kl_k3 = Statistic(_stats.kl_k3)
    ratio_mean = Statistic(_stats.ratio_mean)
    ratio_std = Statistic(_stats.ratio_std)
    ratio_min = Statistic(_stats.ratio_min)
    ratio_max = Statistic(_stats.ratio_max)
    ess = Statistic(_stats.ess)
    ess_fraction = Statistic(_stats.ess_fraction)
    max_weight_ess_fraction = Statistic(_stats.max_weight_ess_fraction)
    chi2 = Statistic(_stats.chi2)
    renyi2 = Statistic(_stats.renyi2)
    clip_fraction_low = Statistic(_stats.clip_fraction_low)
    clip_fraction_high = Statistic(_stats.clip_fraction_high)
    clip_fraction = Statistic(_stats.clip_fraction)

    perplexity_ess_fraction = Statistic(entropy.perplexity_ess_fraction, "entropy")

    probability_diff_mean = Statistic(probabilities.probability_diff_mean, "probabilities")
    probability_diff_std = Statistic(probabilities.probability_diff_std, "probabilities")
    probability_diff_max = Statistic(probabilities.probability_diff_max, "probabilities")
    probability_correlation = Statistic(probabilities.probability_correlation, "probabilities")

    truncated_fraction_low = Statistic(truncation.truncated_fraction_low, "truncation")
    truncated_fraction_high = Statistic(truncation.truncated_fraction_high, "truncation")
    truncated_fraction = Statistic(truncation.truncated_fraction, "truncation")
    clamped_ratio_mean = Statistic(truncation.clamped_ratio_mean, "truncation")
    clamped_ess_fraction = Statistic(truncation.clamped_ess_fraction, "truncation")
    masked_ratio_mean = Statistic(truncation.masked_ratio_mean, "truncation")
    masked_ess_fraction = Statistic(truncation.masked_ess_fraction, "truncation")

    n_advantage_not_finite = Statistic(policy_clip.n_advantage_not_finite, "policy_clip")
    policy_clip_fraction_low = Statistic(policy_clip.policy_clip_fraction_low, "policy_clip")
    policy_clip_fraction_high = Statistic(policy_clip.policy_clip_fraction_high, "policy_clip")
    policy_clip_fraction = Statistic(policy_clip.policy_clip_fraction, "policy_clip")
    dual_clip_fraction = Statistic(policy_clip.dual_clip_fraction, "policy_clip")
    advantage_mean = _of("advantages", _stats.log_ratio_mean)
    advantage_std = _of("advantages", _stats.log_ratio_std)
    advantage_min = _of("advantages", _stats.log_ratio_min)
    advantage_max = _of("advantages", _stats.log_ratio_max)
    advantage_positive_fraction = _of("advantages", _stats.positive_fraction)
    update_ess_fraction = Statistic(policy_clip.update_ess_fraction, "updates")
    update_abs_mean = Statistic(policy_clip.update_abs_mean, "updates")
    update_abs_max = Statistic(policy_clip.update_abs_max, "updates")
    update_abs_p50 = _of("updates", _abs_quantile(0.5))
    update_abs_p99 = _of("updates", _abs_quantile(0.99))
    update_abs_p99_9 = _of("updates", _abs_quantile(0.999))

    n_sequences = _of(SEQUENCE_SUMS, _stats.n_tokens)
    n_sequences_finite = _of(SEQUENCE_SUMS, _stats.n_finite)
    n_sequences_empty = Statistic(sequences.n_sequences_empty, "sequences")
    sequence_log_ratio_mean = _of(SEQUENCE_SUMS, _stats.log_ratio_mean)
    sequence_log_ratio_std = _of(SEQUENCE_SUMS, _stats.log_ratio_std)
    sequence_log_ratio_min = _of(SEQUENCE_SUMS, _stats.log_ratio_min)
    sequence_log_ratio_max = _of(SEQUENCE_SUMS, _stats.log_ratio_max)
    sequence_ratio_mean = _of(SEQUENCE_SUMS, _stats.ratio_mean)
    sequence_ratio_std = _of(SEQUENCE_SUMS, _stats.ratio_std)
    sequence_ratio_min = _of(SEQUENCE_SUMS, _stats.ratio_min)
    sequence_ratio_max = _of(SEQUENCE_SUMS, _stats.ratio_max)
    sequence_ess_fraction = _of(SEQUENCE_SUMS, _stats.ess_fraction)
    sequence_chi2 = _of(SEQUENCE_SUMS, _stats.chi2)
    sequence_renyi2 = _of(SEQUENCE_SUMS, _stats.renyi2)
    sequence_renyi2_unnormalised = _of(SEQUENCE_SUMS, _stats.renyi2_unnormalised)
    sequence_geometric_ratio_mean = _of(SEQUENCE_MEANS, _stats.ratio_mean)
    sequence_geometric_ratio_std = _of(SEQUENCE_MEANS, _stats.ratio_std)
    sequence_geometric_ratio_min = _of(SEQUENCE_MEANS, _stats.ratio_min)
    sequence_geometric_ratio_max = _of(SEQUENCE_MEANS, _stats.ratio_max)
    sequence_geometric_ess_fraction = _of(SEQUENCE_MEANS, _stats.ess_fraction)
    sequence_geometric_clip_fraction = _of(SEQUENCE_MEANS, _stats.clip_fraction)
    sequence_perplexity = _of(LOG_PERPLEXITIES, _stats.ratio_mean)
    sequence_old_perplexity = _of(OLD_LOG_PERPLEXITIES, _stats.ratio_mean)
    sequence_log_perplexity = _of(LOG_PERPLEXITIES, _stats.log_ratio_mean)
    sequence_old_log_perplexity = _of(OLD_LOG_PERPLEXITIES, _stats.log_ratio_mean)
    sequence_log_perplexity_diff_mean = _of(LOG_PERPLEXITY_DIFFERENCES, _stats.log_ratio_mean)
    sequence_log_perplexity_diff_abs_mean = _of(LOG_PERPLEXITY_DIFFERENCES, _stats.log_ratio_abs_mean)
    sequence_log_perplexity_diff_min = _of(LOG_PERPLEXITY_DIFFERENCES, _stats.log_ratio_min)
    sequence_log_perplexity_diff_max = _of(LOG_PERPLEXITY_DIFFERENCES, _stats.log_ratio_max)
    sequence_perplexity_ratio = _of(LOG_PERPLEXITY_DIFFERENCES, _stats.ratio_mean)


SCALARS = scalars_of(SliceView)


class SliceStats(Statistics[SliceView]):
    """Statistics of every slice: ``stats["post_tool"].ess_fraction``. Equal only to itself, and hashable.

    Attributes:
        state: the mergeable :class:`~pyrlstats.state.State` behind it, of x = logp - old_logp.
    """

    kind = "log_ratio"
    _view = SliceView
    _stem = "log_ratio_"
    _default_quantiles = QUANTILES
    _default_abs_quantiles = ABS_QUANTILES
    _columns: ClassVar = {
        "tokens": ("{:,}", "n_tokens"),
        "not finite": ("{:,}", "n_tokens", "n_finite"),
        "zero": ("{:.2%}", "zero_fraction"),
        "ESS": ("{:.2%}", "ess_fraction"),
        "KL k3": ("{:.3g}", "kl_k3"),
        "|x| p50": ("{:.3g}", "abs_log_ratio_p50"),
        "|x| p99": ("{:.3g}", "abs_log_ratio_p99"),
        "|x| p99.9": ("{:.3g}", "abs_log_ratio_p99_9"),
        "min x": ("{:.3g}", "log_ratio_min"),
        "max x": ("{:.3g}", "log_ratio_max"),
        "clipped": ("{:.2%}", "clip_fraction"),
    }

    @property
    def sequences(self) -> SliceStats:
        """The statistics of the sums of x over sequences, one value a sequence: its ratio is the product of theirs.

        Raises:
            AttributeError: sequences were not asked for.
        """
        return SliceStats(self._group(SEQUENCE_SUMS))

    @property
    def sequence_means(self) -> SliceStats:
        """As ``sequences``, of the means of x over sequences: the ratio is the geometric mean of theirs."""
        return SliceStats(self._group(SEQUENCE_MEANS))

    @property
    def log_perplexities(self) -> ValueStats:
        """The distribution over sequences of -mean(logp), nats."""
        return self._values_of(LOG_PERPLEXITIES)

    @property
    def old_log_perplexities(self) -> ValueStats:
        """The distribution over sequences of -mean(old_logp), nats."""
        return self._values_of(OLD_LOG_PERPLEXITIES)

    @property
    def advantages(self) -> ValueStats:
        """The distribution of the advantages A over all members, also those with non-finite x.

        Raises:
            AttributeError: no advantages were given.
        """
        return self._values_of("advantages")

    @property
    def updates(self) -> ValueStats:
        """The distribution of the importance-weighted updates w A; their magnitudes by ``abs_quantile``.

        What is beyond float32, above 3.4e38, counts as infinite.
        """
        return self._values_of("updates")

    def _values_of(self, group: str) -> ValueStats:
        from pyrlstats.values import ValueStats

        return ValueStats(self._group(group))

    def _group(self, name: str) -> State:
        try:
            return self.state.group(name)
        except KeyError:
            option = OPTION_OF.get(name, OPTION_OF["sequences"])
            raise AttributeError(f"{name} was not asked for: {option} adds it") from None
