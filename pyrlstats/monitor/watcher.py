"""The watcher: from the signals of each step to alerts, without files, callbacks or clocks.

It sees the same numbers on every rank and after a resume, and so decides alike. Its memory is of fixed size: rings of
the last steps, the frozen baseline, one EWMA a signal.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyrlstats.layout import Layout
from pyrlstats.monitor.alerts import Alert, Rules
from pyrlstats.monitor.episodes import Episodes, Finding
from pyrlstats.monitor.frozen import Frozen
from pyrlstats.monitor.history import Rings
from pyrlstats.monitor.immediate import immediate
from pyrlstats.monitor.settings import Settings
from pyrlstats.monitor.signals import against
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
        rings: the last steps of every signal.
        last_step: number of the last step taken.
        make: names, layout and clip of the statistics; None before the first.
        frozen: the baseline and what runs against it; None before it is complete.
    """

    def __init__(self, settings: Settings, rules: Rules | None, failed: Callable[[str, Exception], None]) -> None:
        self.rings = Rings()
        self.last_step: int | None = None
        self.make: Make | None = None
        self.frozen: Frozen | None = None
        self._settings = settings
        self._rules = rules
        self._failed = failed
        self._episodes = Episodes()
        self._skipped = 0
        self._rate: float | None = None  # the learning rate before
        self._warmup: list[tuple[int, dict[str, float], State]] = []

    def watch(self, step: int, stats: SliceStats | None, scalars: Mapping[str, float]) -> list[Alert]:
        """Take one step and return what is to be told.

        Args:
            step: its number.
            stats: in NumPy memory, of the same make at every step; or None.
            scalars: the trainer's numbers.
        """
        signals: dict[str, float] = dict(scalars)
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
        if stats is not None:
            if self.frozen is not None:
                findings += self.frozen.watch(step, signals, stats.state)
            else:
                self._warm_up(step, signals, stats.state)
        findings += self._ask_rules(step, signals)
        return self._episodes.tell(findings, self.rings.observed)

    def _ask_rules(self, step: int, signals: Mapping[str, float]) -> list[Finding]:
        if self._rules is None:
            return []
        try:
            return [Finding(f"rule:{alert.key}", alert) for alert in self._rules.evaluate(step, signals, self.rings)]
        except Exception as error:
            self._failed("rules", error)
            return []

    def _warm_up(self, step: int, signals: dict[str, float], state: State) -> None:
        rate = next((signals[name] for name in self._settings.schedule if name in signals), None)
        rising = rate is not None and self._rate is not None and rate > self._rate
        self._rate = rate
        if self._skipped < self._settings.skip:
            self._skipped += 1
        elif rising:
            self._warmup.clear()  # what was seen at a smaller learning rate is no baseline for the full one
        else:
            self._warmup.append((step, signals, state))
            if len(self._warmup) == self._settings.baseline:
                self.frozen = Frozen.from_warmup(self._warmup, self._settings)
                self.rings.freeze(len(self._warmup))
                self._warmup = []

    def save(self) -> bytes | None:
        """All of it as bytes that :meth:`restore` takes; None while the baseline is not frozen."""
        if self.frozen is None:
            return None
        rings, ring_arrays = self.rings.save()
        frozen, frozen_arrays = self.frozen.save()
        header = {"last_step": self.last_step, "rings": rings, "frozen": frozen, "episodes": self._episodes.to_json()}
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
        self.frozen = Frozen.restored(header["frozen"], groups["frozen"], self._settings)
        state = self.frozen.reference.state
        self.make = (state.names, state.layout, state.clip)
        self.rings.restore(header["rings"], groups["rings"])
        self._episodes.restore(header["episodes"])
        self.last_step = header["last_step"]
