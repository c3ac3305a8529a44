"""The watcher: from the signals of each step to alerts, without files, callbacks or clocks.

It sees the same numbers on every rank and after a resume, and so decides alike. Its memory is of fixed size: rings of
the last observations, the frozen baseline, one EWMA a signal.

There are two warm-ups. Slices have theirs, the first steps with statistics, after which growth is looked for. Scalars
have theirs, the first steps of any kind, so that rules can compare them with a baseline where no statistics come, or
rarely. Where every step has statistics the two are the same.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyrlstats.layout import Layout
from pyrlstats.monitor.alerts import Alert, Rules
from pyrlstats.monitor.episodes import Episodes, Finding
from pyrlstats.monitor.frozen import Frozen
from pyrlstats.monitor.history import DEPTH, Rings
from pyrlstats.monitor.immediate import immediate
from pyrlstats.monitor.settings import Settings
from pyrlstats.monitor.signals import against
from pyrlstats.monitor.tails import Tails
from pyrlstats.slice_stats import SliceStats
from pyrlstats.state import State

Make = tuple[tuple[str, ...], Layout, tuple[float, ...]]


class Watcher:
    """Watches one run.

    Args:
        settings: what decides.
        rules: asked at every step; None has none.
        failed: told what could not be done, and why.

    Attributes:
        rings: the last observations of every signal.
        last_step: number of the last step taken.
        make: names, layout and clip of the statistics; None before the first.
        tail_sample_size: of the tails; None before the first.
        frozen: the baseline and what runs against it; None before it is complete.
    """

    def __init__(self, settings: Settings, rules: Rules | None, failed: Callable[[str, Exception], None]) -> None:
        self.rings = Rings(max(DEPTH, getattr(rules, "depth", 0)))
        self.last_step: int | None = None
        self.make: Make | None = None
        self.tail_sample_size: int | None = None
        self.frozen: Frozen | None = None
        self._settings = settings
        self._rules = rules
        self._failed = failed
        self._episodes = Episodes()
        self._skipped = 0
        self._rate: float | None = None  # the learning rate before
        self._calm = 0  # steps of the scalars' warm-up
        self._warmup: list[tuple[int, dict[str, float], State]] = []

    def watch(
        self, step: int, stats: SliceStats | None, scalars: Mapping[str, float], tails: Tails | None = None
    ) -> list[Alert]:
        """Take one step and return what is to be told.

        Args:
            step: its number.
            stats: in NumPy memory, of the same make at every step; or None.
            scalars: the trainer's numbers.
            tails: of one sample size at every step; or None.
        """
        signals: dict[str, float] = dict(scalars)
        if tails is not None:
            self.tail_sample_size = tails.sample_size
            signals.update(tails.figures)
        names: tuple[str, ...] = ()
        if stats is not None:
            names = stats.state.names
            self.make = (names, stats.state.layout, stats.state.clip)
            signals.update(stats.to_dict())
            if self.frozen is not None:
                signals.update(against(stats.state, self.frozen.reference))
        self.rings.push(step, signals)
        self.last_step = step
        findings = list(immediate(step, signals, scalars, names, self.rings))
        rising = self._rate_rises(signals)
        if rising:
            self._warmup.clear()  # what was seen at a smaller learning rate is no baseline for the full one
        self._warm_up_scalars(rising)
        if stats is not None:
            if self.frozen is not None:
                findings += self.frozen.watch(step, signals, stats.state)
            elif stats.state.n_finite().any():
                self._warm_up(step, signals, stats.state, rising)
        findings += self._ask_rules(step, signals)
        return self._episodes.tell(findings, self.rings.observed, step)

    def _ask_rules(self, step: int, signals: Mapping[str, float]) -> list[Finding]:
        if self._rules is None:
            return []
        try:
            cool_down = getattr(self._rules, "cool_down", lambda alert: None)
            alerts = self._rules.evaluate(step, signals, self.rings)
            return [Finding(f"rule:{alert.key}", alert, cool_down(alert)) for alert in alerts]
        except Exception as error:
            self._failed("rules", error)
            return []

    def _rate_rises(self, signals: Mapping[str, float]) -> bool:
        """Whether the learning rate is above that of the step before."""
        before = self._rate
        self._rate = next((signals[name] for name in self._settings.schedule if name in signals), None)
        return self._rate is not None and before is not None and self._rate > before

    def _warm_up_scalars(self, rising: bool) -> None:
        if self._calm == self._settings.baseline or self.rings.observed <= self._settings.skip:
            return
        self._calm = 0 if rising else self._calm + 1
        if self._calm == self._settings.baseline:
            slices = tuple(f"{name}/" for name in self.make[0]) if self.make else ()
            names = (name for name in self.rings.names if not name.startswith(slices))
            self.rings.freeze({name: self.rings.last(name, self._calm) for name in names})

    def _warm_up(self, step: int, signals: dict[str, float], state: State, rising: bool) -> None:
        if self._skipped < self._settings.skip:
            self._skipped += 1
        elif not rising:
            self._warmup.append((step, signals, state))
            if len(self._warmup) == self._settings.baseline:
                self.frozen = Frozen.from_warmup(self._warmup, self._settings)
                rows = [each for _, each, _ in self._warmup]
                names = dict.fromkeys(name for row in rows for name in row)
                self.rings.freeze({name: np.array([row.get(name, math.nan) for row in rows]) for name in names})
                self._warmup = []

    def save(self) -> bytes | None:
        """All of it as bytes that :meth:`restore` takes; None during a warm-up."""
        if self._warmup or (self.frozen is None and self._calm < self._settings.baseline):
            return None
        rings, ring_arrays = self.rings.save()
        frozen, frozen_arrays = self.frozen.save() if self.frozen is not None else (None, {})
        header = {
            "last_step": self.last_step,
            "rings": rings,
            "frozen": frozen,
            "episodes": self._episodes.to_json(),
            "tail_sample_size": self.tail_sample_size,
            "skipped": self._skipped,
            "calm": self._calm,
            "rate": None if self._rate is None else repr(self._rate),
        }
        arrays: dict[str, NDArray[Any]] = {"header": np.frombuffer(json.dumps(header).encode(), np.uint8)}
        for prefix, group in (("rings.", ring_arrays), ("frozen.", frozen_arrays)):
            arrays.update({f"{prefix}{name}": array for name, array in group.items()})
        stream = io.BytesIO()
        np.savez_compressed(stream, allow_pickle=False, **arrays)
        return stream.getvalue()

    def restore(self, data: bytes) -> None:
        """Continue where :meth:`save` was called.

        Raises:
            ValueError, KeyError, TypeError, OSError, zipfile.BadZipFile: other or damaged data.
        """
        groups: dict[str, dict[str, NDArray[Any]]] = {"rings": {}, "frozen": {}}
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            header = json.loads(file["header"].tobytes())
            for name in file.files:
                if name != "header":
                    prefix, key = name.split(".", 1)
                    groups[prefix][key] = file[name]
        if header["frozen"] is not None:
            self.frozen = Frozen.restored(header["frozen"], groups["frozen"], self._settings)
            state = self.frozen.reference.state
            self.make = (state.names, state.layout, state.clip)
        self.tail_sample_size = header["tail_sample_size"]
        self._skipped, self._calm = int(header["skipped"]), int(header["calm"])
        self._rate = None if header["rate"] is None else float(header["rate"])
        self.rings.restore(header["rings"], groups["rings"])
        self._episodes.restore(header["episodes"])
        self.last_step = header["last_step"]
