"""The frozen baseline of a run and what runs against it: made from a warm-up, or from what was saved."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyrlstats.monitor.drift import LEAST_SD, Baseline, Drift, fit
from pyrlstats.monitor.episodes import Finding
from pyrlstats.monitor.growth import WINDOW, Limits, Scene, growth, verdict
from pyrlstats.monitor.settings import Settings
from pyrlstats.monitor.signals import SIGNALS, Reference, against, least_noise, values_of
from pyrlstats.slice_stats import SliceStats
from pyrlstats.state import State

Floats = NDArray[np.float64]
Arrays = Mapping[str, NDArray[Any]]
Warmup = Sequence[tuple[int, Mapping[str, float], State]]  # step, signals, state

RECENT = 10  # steps pooled as "now"
MOST_CONTEXT = 64  # scalars followed beside the slices
GLOBAL_KL = "global KL"


class OtherSignals(ValueError):
    """What was saved is of a pyrlstats that watched other signals."""


class Frozen:
    """Growth of the slices against a baseline.

    Args:
        reference: the pooled warm-up.
        drift: of all slices' signals, one row.
        context: of the global KL and the scalars.
        context_names: theirs.
        settings: for the limits.
    """

    def __init__(
        self, reference: Reference, drift: Drift, context: Drift, context_names: tuple[str, ...], settings: Settings
    ) -> None:
        self.reference = reference
        self.drift = drift
        self.limits = Limits.of(drift.baseline, settings.false_warnings, settings.false_stops)
        self._context = context
        self._context_names = context_names
        self._steps: deque[int] = deque(maxlen=WINDOW)
        self._values: deque[Floats] = deque(maxlen=WINDOW)
        self._recent: deque[State] = deque(maxlen=RECENT)
        self._since: NDArray[np.int64] = np.zeros(drift.deviation.shape, np.int64)

    @classmethod
    def from_warmup(cls, warmup: Warmup, settings: Settings) -> Frozen:
        """Freeze the baseline."""
        reference = Reference(pooled(state for _, _, state in warmup))
        names = reference.names
        rows = [{**signals, **against(state, reference)} for _, signals, state in warmup]
        values = np.array([values_of(row, names).ravel() for row in rows])
        drift = Drift(fit(values, np.maximum(LEAST_SD, least_noise(rows, names).ravel())))
        slices = tuple(f"{name}/" for name in names)
        scalars = [key for key in rows[-1] if key != "n_out_of_range" and not key.startswith(slices)]
        context_names = (GLOBAL_KL, *scalars[:MOST_CONTEXT])
        frozen = cls(reference, drift, _context(rows, names, context_names), context_names, settings)
        frozen._steps.extend(step for step, _, _ in warmup)
        frozen._values.extend(values)
        frozen._recent.extend(state for _, _, state in warmup)
        frozen._since[:] = warmup[-1][0]
        return frozen

    @property
    def then_and_now(self) -> tuple[State, State]:
        """The state of the baseline, and that of the last steps."""
        return self.reference.state, pooled(self._recent)

    def watch(self, step: int, signals: Mapping[str, float], state: State) -> list[Finding]:
        """Take one step; ``signals`` hold those of :func:`against` too."""
        names, drift = self.reference.names, self.drift
        values = values_of(signals, names).ravel()
        drift.update(values)
        self._context.update(_context_of(signals, names, self._context_names))
        self._steps.append(step)
        self._values.append(values)
        self._recent.append(state)
        self._since = np.where(drift.deviation > 0.0, self._since, step)
        if not (drift.score() > 0.5 * self.limits.warning).any():
            return []
        scene = Scene(
            names,
            drift,
            self.limits,
            np.array(self._steps),
            np.array(self._values),
            self._since,
            self.reference,
            pooled(self._recent),
            {
                name: verdict(self._context, index)
                for index, name in enumerate(self._context_names)
                if self._context.baseline.watched[index]
            },
        )
        return list(growth(scene))

    def save(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """JSON values and arrays that :meth:`restored` takes."""
        arrays = {
            "reference": self.reference.state.buffer,
            "recent": np.array([state.buffer for state in self._recent]),
            "steps": np.array(self._steps),
            "values": np.array(self._values),
            "since": self._since,
        }
        for name, drift in (("drift", self.drift), ("context", self._context)):
            baseline = drift.baseline
            arrays[name] = np.array([baseline.location, baseline.sd, baseline.rho, baseline.n, drift.deviation])
        return {"parts": self.reference.state.parts(SliceStats.kind), "context": self._context_names}, arrays

    @classmethod
    def restored(cls, saved: Mapping[str, Any], arrays: Arrays, settings: Settings) -> Frozen:
        """What :meth:`save` gave.

        Raises:
            KeyError, ValueError, TypeError: something else.
        """
        parts = saved["parts"]
        reference = Reference(State.from_parts(parts, SliceStats.kind, arrays["reference"]))
        drifts = []
        for name in ("drift", "context"):
            *baseline, deviation = arrays[name]
            drift = Drift(Baseline(*baseline))
            drift.deviation = deviation
            drifts.append(drift)
        if drifts[0].deviation.shape != (len(reference.names) * len(SIGNALS),):
            raise OtherSignals(f"saved with other signals than the {len(SIGNALS)} a slice that are watched now")
        frozen = cls(reference, drifts[0], drifts[1], tuple(saved["context"]), settings)
        frozen._steps.extend(arrays["steps"].tolist())
        frozen._values.extend(arrays["values"])
        frozen._recent.extend(State.from_parts(parts, SliceStats.kind, buffer) for buffer in arrays["recent"])
        frozen._since = arrays["since"]
        return frozen


def pooled(states: Iterable[State]) -> State:
    """As if all tokens had come in one call."""
    first, *rest = states
    total = first.copy()
    for state in rest:
        total.merge_(state)
    return total


def _context(rows: Sequence[Mapping[str, float]], names: tuple[str, ...], context_names: tuple[str, ...]) -> Drift:
    values = np.array([_context_of(row, names, context_names) for row in rows])
    scale = np.abs(np.median(np.where(np.isfinite(values), values, 0.0), 0))
    least = LEAST_SD * scale + 1e-12
    least[0] = LEAST_SD  # a logarithm already
    return Drift(fit(values, least))


def _context_of(signals: Mapping[str, float], names: tuple[str, ...], context_names: tuple[str, ...]) -> Floats:
    scalars = [signals.get(name, math.nan) for name in context_names[1:]]
    return np.array([global_kl(signals, names), *scalars])


def global_kl(signals: Mapping[str, float], names: tuple[str, ...]) -> float:
    """Logarithm of the KL k3 over the tokens of all slices: what a mean over everything shows."""
    total = tokens = 0.0
    for name in names:
        n, kl = signals.get(f"{name}/n_finite", 0.0), signals.get(f"{name}/kl_k3", math.nan)
        if n > 0 and math.isfinite(kl):
            total, tokens = total + n * kl, tokens + n
    return math.log(total / tokens) if total > 0.0 else math.nan
