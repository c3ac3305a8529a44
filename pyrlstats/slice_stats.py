"""Results of log-ratios: ``SliceStats``, a mapping slice name -> view of its statistics."""

from __future__ import annotations

from typing import ClassVar

from pyrlstats import stats as _stats
from pyrlstats.results import Statistic, Statistics, View, percentile_name, scalars_of

__all__ = ["ABS_QUANTILES", "QUANTILES", "SCALARS", "SliceStats", "SliceView", "percentile_name"]

QUANTILES = (0.001, 0.01, 0.5, 0.99, 0.999)
ABS_QUANTILES = (0.5, 0.99, 0.999, 0.9999)


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
