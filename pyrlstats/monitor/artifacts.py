"""What is left of an alert, small enough to mail: alert.json, and figure.png where matplotlib is installed."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np

from pyrlstats.monitor.alerts import Alert
from pyrlstats.monitor.folder import ARTIFACTS, RunWriter, artifact_name
from pyrlstats.monitor.history import DEPTH
from pyrlstats.monitor.signals import SIGNALS
from pyrlstats.monitor.watcher import Watcher
from pyrlstats.quantiles import tail_mass
from pyrlstats.state import State


def write_artifact(writer: RunWriter, alert: Alert, watcher: Watcher) -> None:
    """Write the folder of an alert.

    Raises:
        OSError: it could not be written.
    """
    folder = f"{ARTIFACTS}/{artifact_name(alert)}"
    text = json.dumps(alert.to_json(), indent=2, allow_nan=False) + "\n"
    writer.replace_file(f"{folder}/alert.json", text.encode())
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return
    writer.replace_file(f"{folder}/figure.png", figure(alert, watcher))


def figure(alert: Alert, watcher: Watcher) -> bytes:
    """A PNG: the signal over the last steps, and the tail then and now where the alert is of a slice."""
    from matplotlib.figure import Figure

    states = watcher.frozen.then_and_now if watcher.frozen and alert.slice is not None else None
    picture = Figure(figsize=(9.0 if states else 5.0, 3.6), layout="constrained")
    axes = picture.subplots(1, 2 if states else 1, squeeze=False)[0]
    _draw_signal(axes[0], alert, watcher)
    if states and alert.slice is not None:
        _draw_tails(axes[1], alert.slice, *states)
    picture.suptitle("\n".join(_wrap(alert.message, 110 if states else 60)), fontsize="small")
    stream = io.BytesIO()
    picture.savefig(stream, format="png", dpi=100)
    return stream.getvalue()


def _draw_signal(axes: Any, alert: Alert, watcher: Watcher) -> None:
    """The signal, and the same one of the other slices."""
    rings = watcher.rings
    steps = rings.steps(DEPTH)
    figure_of_slice = alert.signal.split("/", 1)[1] if alert.slice else alert.signal
    names = [name for name in rings.names if name.endswith(f"/{figure_of_slice}")] if alert.slice else [alert.signal]
    smallest = np.inf
    for name in names:
        values = rings.last(name, DEPTH)
        own = name == alert.signal
        axes.plot(steps, values, linewidth=1.6 if own else 0.9, label=name.split("/")[0], zorder=3 if own else 2)
        finite = values[np.isfinite(values)]
        smallest = min(smallest, finite.min() if finite.size else np.inf)
    before = rings.baseline(alert.signal)
    if before is not None:
        axes.axhline(before, color="grey", linestyle="--", linewidth=0.8, label="baseline")
    axes.axvline(alert.step, color="black", linewidth=0.6)
    linear = any(signal.linear and signal.key == figure_of_slice for signal in SIGNALS)
    if 0.0 < smallest < np.inf and alert.slice and not linear:
        axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_title(figure_of_slice, fontsize="small")
    if len(names) > 1 or before is not None:
        axes.legend(fontsize="x-small")


def _draw_tails(axes: Any, name: str, then: State, now: State) -> None:
    """Share of tokens beyond each size, in the baseline and over the last steps."""
    row = then.names.index(name)
    sizes = np.geomspace(1e-5, 100.0, 200)
    for state, label in ((then, "baseline"), (now, "now")):
        share = tail_mass(state, sizes.tolist())[row]
        shown = share > 0.0
        axes.plot(sizes[shown], share[shown], linewidth=1.2, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("|log-ratio|, nats")
    axes.set_title(f"{name}: share of tokens beyond", fontsize="small")
    axes.legend(fontsize="x-small")


def _wrap(text: str, width: int) -> list[str]:
    import textwrap

    return textwrap.wrap(text, width)
