"""The pictures of a report, as SVG: each of one subject, drawn from pooled groups of steps."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from numpy.typing import NDArray

from pyrlstats import quantiles as _quantiles
from pyrlstats.monitor.alerts import LEVELS, Alert
from pyrlstats.watch.pooling import Group, evaluated
from pyrlstats.watch.summary import Summary, pareto_k

Floats = NDArray[np.float64]

PALETTE = ("#4477aa", "#228833", "#cc3311", "#aa3377", "#997700", "#009988")
LEVEL_COLOURS = {"info": "#4477aa", "warning": "#d98200", "stop": "#c4203b"}
_INK, _FAINT = "#24292f", "#8c959f"
_STYLE = {
    "font.size": 9,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#d8dee4",
    "grid.linewidth": 0.6,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.hashsalt": "pyrlstats",
}
_WIDTH = 11.0  # inches, of every picture
_SMALLEST = 1e-7  # nats: what a logarithmic axis shows of 0


def picture(draw: Callable[[Figure], None], height: float) -> str:
    """An SVG document of a picture that ``draw`` fills."""
    with matplotlib.rc_context(_STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        draw(figure)
        stream = io.StringIO()
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    return stream.getvalue()


def pictures(summary: Summary) -> list[tuple[str, str, str]]:
    """(title, caption, SVG) of every picture that the run has data for."""
    found: list[tuple[str, str, str]] = []
    n, rows = len(summary.slices), -(-len(summary.slices) // 3)
    if summary.judged.alerts:
        height = 0.9 + 0.28 * len(_lanes(summary.judged.alerts))
        found.append(
            (
                "Alerts on the time line",
                "Each mark is the beginning of an episode of trouble.",
                picture(lambda figure: _timeline(figure, summary), height),
            )
        )
    if n:
        found.append(
            (
                "Tails of the log-ratio",
                "Quantiles of |log-ratio| over steps, slice by slice, on a logarithmic axis of one scale. Vertical "
                "lines are alerts about the slice.",
                picture(lambda figure: _fans(figure, summary), 0.5 + 2.9 * rows),
            )
        )
        found.append(
            (
                "Slices side by side",
                "Effective sample size, KL, tail and clipped tokens of all slices.",
                picture(lambda figure: _side_by_side(figure, summary), 5.6),
            )
        )
        if any(pareto_k(summary.run, name) is not None for name in summary.slices):
            found.append(
                (
                    "Pareto k of the weights",
                    "How heavy the right tail of w = exp(x) is, means of neighbouring steps, as the run recorded it at "
                    "one sample size. Above 0.7, the dashed line, no sample size in reach makes their means reliable.",
                    picture(lambda figure: _far_tails(figure, summary), 2.9),
                )
            )
        found.append(
            (
                "The distribution then and now",
                "The first and the last tenth of the run, pooled exactly. Above: share of the tokens with a log-ratio "
                "up to x. Below: share with one beyond, either side, both axes logarithmic: a tail that grows moves "
                "to the right.",
                picture(lambda figure: _then_and_now(figure, summary), 5.6 if n <= 3 else 2.8 * 2 * rows),
            )
        )
        found.append(
            (
                "The distribution over steps",
                "Share of the tokens in each bin of the log-ratio, from the exact counts: dark is many. The band in "
                f"the middle is everything from -{plain_number(_scale(summary)[0])} to "
                f"{plain_number(_scale(summary)[0])} nats.",
                picture(lambda figure: _heat(figure, summary), 0.6 + 2.9 * rows),
            )
        )
    if summary.scalars and len(summary.run.steps):
        lines = -(-len(summary.scalars) // 3)
        found.append(
            (
                "What the trainer logged",
                "Means of neighbouring steps; the band is from the smallest to the largest of them.",
                picture(lambda figure: _scalars(figure, summary), 0.3 + 1.7 * lines),
            )
        )
    return found


def _lanes(alerts: Sequence[Alert], most: int = 16) -> list[tuple[str, list[Alert]]]:
    """Alerts by what they are about, in the order of the first; the last lane holds what is too much."""
    lanes: dict[str, list[Alert]] = {}
    for alert in alerts:
        lanes.setdefault(f"{alert.name}  {alert.slice or ''}".strip(), []).append(alert)
    ordered = list(lanes.items())
    if len(ordered) > most:
        rest = [alert for _, lane in ordered[most - 1 :] for alert in lane]
        ordered = [*ordered[: most - 1], (f"{len(ordered) - most + 1} others", rest)]
    return ordered


def _timeline(figure: Figure, summary: Summary) -> None:
    lanes = _lanes(summary.judged.alerts)
    axes = figure.add_subplot()
    for row, (_, alerts) in enumerate(lanes):
        for level in LEVELS:
            steps = [alert.step for alert in alerts if alert.level == level]
            axes.scatter(steps, [row] * len(steps), color=LEVEL_COLOURS[level], s=42, zorder=3, clip_on=False)
    axes.set_yticks(range(len(lanes)), [name for name, _ in lanes])
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.grid(axis="x", visible=False)
    _steps_axis(axes, summary)
    for level in LEVELS:
        axes.scatter([], [], color=LEVEL_COLOURS[level], s=42, label=level)
    figure.legend(loc="outside upper right", ncols=3, handletextpad=0.1)


def _steps_axis(axes: Axes, summary: Summary, label: bool = True) -> None:
    steps = summary.run.steps
    first, last = int(steps[0]), int(steps[-1])
    margin = max(0.5, 0.01 * (last - first))
    axes.set_xlim(first - margin, last + margin)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    if label:
        axes.set_xlabel("step")


def _grid(figure: Figure, summary: Summary, shared: bool = True) -> list[Axes]:
    """One axes a slice, three a row."""
    n = len(summary.slices)
    columns = min(3, n)
    rows = -(-n // columns)
    axes: list[Axes] = []
    for index in range(n):
        first = axes[0] if axes and shared else None
        axes.append(figure.add_subplot(rows, columns, index + 1, sharex=first, sharey=first))
    return axes


def _colour(summary: Summary, name: str) -> str:
    return PALETTE[summary.slices.index(name) % len(PALETTE)]


def _column(groups: Sequence[Group], name: str, statistic: str) -> Floats:
    """A statistic of a slice over groups."""
    return np.array([evaluated(group.stats.state, [statistic])[statistic][_row(group, name)] for group in groups])


def _row(group: Group, name: str) -> int:
    return group.stats.state.names.index(name)


def _middles(groups: Sequence[Group]) -> Floats:
    return np.array([group.middle for group in groups])


_FAN = ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"), (0.999, "p99.9"), (0.9999, "p99.99"), (1.0, "max"))


def _fans(figure: Figure, summary: Summary) -> None:
    groups = summary.pooled.groups
    x = _middles(groups)
    levels = [level for level, _ in _FAN]
    with np.errstate(all="ignore"):
        values = np.array([_quantiles.abs_quantile(group.stats.state, levels) for group in groups])  # groups, S, levels
    shown = [values[:, _row(groups[0], name)] for name in summary.slices]
    positive = np.concatenate([each[:, 1:][each[:, 1:] > _SMALLEST] for each in shown])
    top = float(positive.max()) if len(positive) else 1.0
    bottom = max(float(positive.min()) / 30.0, _SMALLEST) if len(positive) else _SMALLEST
    for axes, name, lines in zip(_grid(figure, summary), summary.slices, shown, strict=True):
        colour = _colour(summary, name)
        drawn = np.where(np.isfinite(lines), np.maximum(lines, bottom), math.nan)
        for index in range(len(_FAN) - 2):
            alpha = 0.34 - 0.07 * index
            axes.fill_between(x, drawn[:, index], drawn[:, index + 1], color=colour, alpha=alpha, lw=0)
        for index, (_, label) in enumerate(_FAN):
            style: dict[str, Any] = {"lw": 1.4 if label == "p99.9" else 0.8}
            if label == "max":
                style = {"lw": 0.6, "ls": ":", "alpha": 0.8}
            axes.plot(x, drawn[:, index], color=colour, marker="o" if len(x) == 1 else None, ms=3, **style)
        _end_labels(axes, drawn[-1], [label for _, label in _FAN], bottom, top)
        axes.set_yscale("log")
        axes.set_ylim(bottom * 0.8, top * 1.6)
        _log_axis(axes.yaxis)
        axes.set_title(name, color=colour)
        _steps_axis(axes, summary)
        _mark_alerts(axes, summary.judged.alerts, name)
    for axes in figure.axes[::3]:
        axes.set_ylabel("|log-ratio|, nats")
    for axes in figure.axes:
        axes.tick_params(labelleft=True)


def _end_labels(axes: Axes, values: Floats, labels: Sequence[str], bottom: float, top: float) -> None:
    """The names of the lines at their right end, moved apart where they would lie on each other."""
    low, high = math.log(bottom * 0.8), math.log(top * 1.6)
    apart = 0.055 * (high - low)
    known = [(math.log(value), label) for value, label in zip(values.tolist(), labels, strict=True) if value > 0.0]
    places = [place for place, _ in known]
    for index in range(1, len(places)):
        places[index] = max(places[index], places[index - 1] + apart)
    for index in reversed(range(len(places))):  # what was pushed out at the top goes back down
        places[index] = min(places[index], high - (len(places) - 1 - index) * apart)
    for place, (_, label) in zip(places, known, strict=True):
        axes.annotate(
            label, (1.01, math.exp(place)), xycoords=("axes fraction", "data"), fontsize=7, va="center", color=_INK
        )


def _mark_alerts(axes: Axes, alerts: Sequence[Alert], name: str) -> None:
    mine = [alert for alert in alerts if alert.slice == name]
    mine.sort(key=lambda alert: (-LEVELS.index(alert.level), alert.step))
    for alert in mine[:12]:
        axes.axvline(alert.step, color=LEVEL_COLOURS[alert.level], lw=1.0, ls=(0, (4, 2)), zorder=1)


_BESIDE = (
    ("ess_fraction", "effective sample size, share of the tokens", "linear"),
    ("kl_k3", "KL k3, nats a token", "log"),
    ("abs_log_ratio_p99_9", "p99.9 of |log-ratio|, nats", "log"),
    ("clip_fraction", "clipped tokens, share", "linear"),
)


def _side_by_side(figure: Figure, summary: Summary) -> None:
    groups = summary.pooled.groups
    x = _middles(groups)
    names = [key for key, _, _ in _BESIDE]
    columns = [evaluated(group.stats.state, names) for group in groups]
    for place, (key, title, scale) in enumerate(_BESIDE):
        axes = figure.add_subplot(2, 2, place + 1)
        smallest = math.inf
        for name in summary.slices:
            values = np.array([column[key][_row(groups[0], name)] for column in columns])
            if scale == "log":
                values = np.where(values > 0.0, values, math.nan)
                smallest = min(smallest, float(np.nanmin(values)) if np.isfinite(values).any() else math.inf)
            axes.plot(x, values, color=_colour(summary, name), lw=1.3, marker="o" if len(x) == 1 else None, label=name)
        if scale == "log" and math.isfinite(smallest):
            axes.set_yscale("log")
            _log_axis(axes.yaxis)
        axes.set_title(title)
        _steps_axis(axes, summary, label=place > 1)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=len(labels))


def _far_tails(figure: Figure, summary: Summary) -> None:
    axes = figure.add_subplot()
    for name in summary.slices:
        values = pareto_k(summary.run, name)
        if values is not None:
            known = np.isfinite(values)
            x, mean, _, _ = thinned(summary.run.steps[known].astype(np.float64), values[known], _POINTS)
            axes.plot(x, mean, color=_colour(summary, name), lw=1.3, marker="o" if len(x) == 1 else None, label=name)
    axes.axhline(0.7, color=_FAINT, lw=1.0, ls=(0, (4, 2)))
    axes.set_ylabel("k")
    _steps_axis(axes, summary)
    figure.legend(loc="outside upper right", ncols=len(summary.slices))


def _log_axis(axis: Any) -> None:
    """Plain numbers on a logarithmic axis, as many as are legible also where it spans less than a decade."""
    low, high = axis.get_view_interval()
    decades = math.log10(high / low) if 0.0 < low < high else 1.0
    if decades > 2.0:
        axis.set_major_locator(LogLocator(numticks=6))
    else:
        axis.set_major_locator(LogLocator(subs=(1.0, 3.0) if decades > 1.0 else (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: plain_number(value)))


def plain_number(value: float) -> str:
    """A tick as people write it: 0.001, 3, 1e-5."""
    if value == 0.0:
        return "0"
    if 1e-3 <= abs(value) < 1e4:
        return f"{value:.4g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def _then_and_now(figure: Figure, summary: Summary) -> None:
    assert summary.then is not None
    assert summary.now is not None
    names = summary.slices
    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    low, high = _scale(summary)
    least = low / 2.0
    magnitudes = np.geomspace(least, high, 160)
    signed = np.concatenate((-magnitudes[::-1], [0.0], magnitudes))
    windows = ((summary.then, "--", "first tenth"), (summary.now, "-", "last tenth"))
    for index, name in enumerate(names):
        row, column = divmod(index, columns)
        cdf = figure.add_subplot(2 * rows, columns, 2 * row * columns + column + 1)
        tail = figure.add_subplot(2 * rows, columns, (2 * row + 1) * columns + column + 1)
        colour = _colour(summary, name)
        least_share = 1.0
        for group, style, label in windows:
            place = _row(group, name)
            with np.errstate(all="ignore"):
                through = _quantiles.cdf(group.stats.state, signed.tolist())[place]
                beyond = _quantiles.tail_mass(group.stats.state, magnitudes.tolist())[place]
            least_share = min(least_share, float(np.min(beyond[beyond > 0.0], initial=1.0)))
            width = 1.0 if style == "--" else 1.5
            cdf.plot(_symmetric(signed, least), through, color=colour, ls=style, lw=width, label=label)
            tail.plot(
                magnitudes, np.where(beyond > 0.0, beyond, math.nan), color=colour, ls=style, lw=width, label=label
            )
        _signed_axis(cdf.xaxis, least, low, high)
        cdf.set_ylim(-0.02, 1.02)
        cdf.set_title(name, color=colour)
        cdf.set_xlabel("log-ratio x, nats")
        cdf.legend(loc="upper left")
        tail.set_xlim(least, high)
        tail.set_xscale("log")
        _log_axis(tail.xaxis)
        if least_share < 1.0:
            tail.set_ylim(least_share / 2.0, 1.5)
            tail.set_yscale("log")
            _log_axis(tail.yaxis)
        tail.set_xlabel("u, nats")
        if column == 0:
            cdf.set_ylabel("share with log-ratio ≤ x")
            tail.set_ylabel("share with |log-ratio| > u")


def _scale(summary: Summary) -> tuple[float, float]:
    """The magnitudes that are worth showing: from well below the median to the largest, whole powers of ten."""
    assert summary.now is not None
    assert summary.then is not None
    rows = [_row(summary.now, name) for name in summary.slices]
    with np.errstate(all="ignore"):
        ends = np.array(
            [_quantiles.abs_quantile(group.stats.state, [0.5, 0.9, 1.0])[rows] for group in (summary.then, summary.now)]
        )
    ends = ends[np.isfinite(ends) & (ends > 0.0)]
    if not len(ends):
        return 1e-6, 1.0
    high = 10.0 ** math.ceil(math.log10(max(float(ends.max()), 1e-5)))
    low = 10.0 ** math.floor(math.log10(max(float(ends.min()) / 3.0, _SMALLEST)))
    return max(low, high * 1e-7), high


def _symmetric(x: Floats, least: float) -> Floats:
    """Where a signed value is drawn: the logarithm of its magnitude over ``least``, 0 below that, with its sign."""
    return np.sign(x) * np.log10(np.maximum(np.abs(x) / least, 1.0))


def _signed_axis(axis: Any, least: float, low: float, high: float) -> None:
    """Ticks at powers of ten from ``low`` to ``high`` on both sides, as :func:`_symmetric` places them."""
    first, last = round(math.log10(low)), round(math.log10(high))
    every = max(1, math.ceil((last - first) / 3))
    powers = np.arange(last, first - 1, -every)
    places = powers - math.log10(least)
    apart = places > 0.22 * places[0]  # from the tick of 0
    powers, places = powers[apart], places[apart]
    names = [plain_number(10.0 ** float(power)) for power in powers]
    axis.set_ticks(
        np.concatenate((-places, [0.0], places[::-1])), labels=[*(f"-{name}" for name in names), "0", *names[::-1]]
    )


_HEAT_BINS = 56  # a sign


def _heat(figure: Figure, summary: Summary) -> None:
    groups = summary.pooled.groups
    low, high = _scale(summary)
    magnitudes = np.geomspace(low, high, _HEAT_BINS + 1)
    edges = np.concatenate((-magnitudes[::-1], magnitudes))
    with np.errstate(all="ignore"):
        through = np.array([_quantiles.cdf(group.stats.state, edges.tolist()) for group in groups])
    shares = np.diff(through, axis=-1)
    shown = [
        np.where(shares[:, _row(groups[0], name)] > 0.0, shares[:, _row(groups[0], name)], math.nan)
        for name in summary.slices
    ]
    finite = np.concatenate([each[np.isfinite(each)] for each in shown])
    least = float(finite.min()) if len(finite) else 1e-6
    norm = LogNorm(max(least, 1e-7), 1.0)
    steps = np.array([group.first for group in groups] + [groups[-1].last + 1], np.float64) - 0.5
    image = None
    least = low / 1.3  # what lies between -low and low is a band of its own
    for axes, name, values in zip(_grid(figure, summary), summary.slices, shown, strict=True):
        image = axes.pcolormesh(steps, _symmetric(edges, least), values.T, norm=norm, cmap="magma_r", rasterized=True)
        axes.grid(visible=False)
        _signed_axis(axes.yaxis, least, low, high)
        axes.set_title(name, color=_colour(summary, name))
        _steps_axis(axes, summary)
    for axes in figure.axes[::3]:
        axes.set_ylabel("log-ratio, nats")
    if image is not None:
        bar = figure.colorbar(image, ax=figure.axes, label="share of the tokens", fraction=0.025, pad=0.01)
        _log_axis(bar.ax.yaxis)


_POINTS = 300  # of a scalar's line


def _scalars(figure: Figure, summary: Summary) -> None:
    steps = summary.run.steps
    for index, key in enumerate(summary.scalars):
        axes = figure.add_subplot(-(-len(summary.scalars) // 3), 3, index + 1)
        values = summary.run.table.signals[key]
        known = np.isfinite(values)
        x, mean, lowest, highest = thinned(steps[known].astype(np.float64), values[known], _POINTS)
        axes.fill_between(x, lowest, highest, color=_INK, alpha=0.15, lw=0)
        axes.plot(x, mean, color=_INK, lw=1.0, marker="o" if len(x) < 40 else None, ms=2.5)
        lost = int(np.isinf(values).sum()) + sum(
            int((there & (values != values)).sum()) for name, there in summary.run.table.present.items() if name == key
        )
        axes.set_title(key + (f"  ({lost:,} not finite)" if lost else ""), fontsize=8.5)
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.tick_params(labelsize=8)
        _steps_axis(axes, summary, label=index >= len(summary.scalars) - 3)


def thinned(x: Floats, values: Floats, most: int) -> tuple[Floats, Floats, Floats, Floats]:
    """At most ``most`` points: mean x, mean, smallest and largest value of neighbours."""
    if len(x) <= most:
        return x, values, values, values
    starts = np.linspace(0, len(x), most, endpoint=False).astype(np.int64)
    sizes = np.diff(np.append(starts, len(x)))
    return (
        np.add.reduceat(x, starts) / sizes,
        np.add.reduceat(values, starts) / sizes,
        np.minimum.reduceat(values, starts),
        np.maximum.reduceat(values, starts),
    )
