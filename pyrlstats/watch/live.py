"""A run while it goes on: what the terminal view knows, brought up to date without reading everything again."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pyrlstats.monitor.alerts import Alert
from pyrlstats.monitor.folder import RUN, RunReader
from pyrlstats.monitor.rules import RuleSet
from pyrlstats.slice_stats import SliceStats
from pyrlstats.watch.judging import ask_rules
from pyrlstats.watch.pooling import evaluated
from pyrlstats.watch.runs import Run, RunError, open_run, run_of
from pyrlstats.watch.summary import scalars_of

Floats = NDArray[np.float64]

_MOST_SLICES = 12
_MOST_SCALARS = 10
_SEEN = 48  # steps of the small picture of a tail
_RULES_UP_TO = 2_000  # steps with states for which rules are asked again at every frame


@dataclass(frozen=True)
class View:
    """What one frame shows.

    Attributes:
        run: as far as it has been read.
        last: statistics of the last step that has some.
        tails: of each slice shown, p99.9 of abs(x) at steps spread over the run; NaN where there is none.
        slices: shown; hidden: how many more there are.
        scalars: keys shown.
        alerts: by step.
        notices: what could not be looked at.
    """

    run: Run
    last: SliceStats | None
    tails: dict[str, Floats]
    slices: tuple[str, ...]
    hidden: int
    scalars: tuple[str, ...]
    alerts: list[Alert]
    notices: list[str]


class Follower:
    """Follows a run that is being written.

    Args:
        path: as :func:`pyrlstats.watch.runs.open_run` takes it.
        rules: asked where no monitor watches the run.

    Raises:
        RunError: it cannot be read.
    """

    def __init__(self, path: str | Path, rules: RuleSet) -> None:
        self._path = Path(path)
        self._rules = rules
        self._reader: RunReader | None = None
        self._tails: dict[int, Floats | None] = {}  # by step: p99.9 of every slice
        self._stamp: tuple[int, int] | None = None
        self._view: View | None = None
        if (self._path / RUN).exists():
            try:
                self._reader = RunReader(self._path)
            except (OSError, ValueError) as error:
                raise RunError(f"{self._path} cannot be read: {error}") from error
        self.look()

    def look(self) -> View:
        """The run as it is now.

        Raises:
            RunError: it can no longer be read.
        """
        if self._reader is not None:
            try:
                new = self._reader.refresh()
            except (OSError, ValueError) as error:
                raise RunError(f"{self._path} can no longer be read: {error}") from error
            for record in new:  # a step that was written again
                self._tails.pop(record.step, None)
            if self._view is None or new or self._reader.alerts != self._view.alerts:
                self._view = self._of(run_of(self._reader))
            return self._view
        stamp = self._changed()
        if self._view is None or stamp != self._stamp:
            self._stamp = stamp
            self._tails.clear()
            self._view = self._of(open_run(self._path))
        return self._view

    def _changed(self) -> tuple[int, int]:
        if not self._path.exists():
            return 0, 0  # opening it says what is wrong
        paths = [each for each in self._path.iterdir() if each.is_file()] if self._path.is_dir() else [self._path]
        stats = [each.stat() for each in paths]
        return max((each.st_mtime_ns for each in stats), default=0), sum(each.st_size for each in stats)

    def _of(self, run: Run) -> View:
        alerts, notices = run.alerts, list[str]()
        if alerts is None and (run.states is None or len(run.steps) <= _RULES_UP_TO):
            judged = ask_rules(run, self._rules)
            alerts, notices = judged.alerts, judged.notices
        elif alerts is None:
            notices = [f"over {_RULES_UP_TO:,} steps rules are not asked at every look: see pyrlstats replay"]
        names = run.states.names if run.states is not None else ()
        shown = names[:_MOST_SLICES]
        tails, last = self._tails_of(run) if run.states is not None else ({}, None)
        return View(
            run=run,
            last=last,
            tails={name: tails.get(name, np.zeros(0)) for name in shown},
            slices=shown if last is not None else (),
            hidden=len(names) - len(shown),
            scalars=scalars_of(run, self._rules, _MOST_SCALARS),
            alerts=sorted(alerts or [], key=lambda alert: alert.step),
            notices=notices,
        )

    def _tails_of(self, run: Run) -> tuple[dict[str, Floats], SliceStats | None]:
        assert run.states is not None
        having = [index for index in range(len(run.steps)) if run.states.has(index)]
        if not having:
            return {}, None
        spread = sorted({having[round(place)] for place in np.linspace(0, len(having) - 1, _SEEN)})
        steps = run.steps.tolist()
        wanted = [index for index in spread if steps[index] not in self._tails]
        last = next(run.states.read([having[-1]]))
        for index, state in zip(wanted, run.states.read(wanted), strict=True):
            tail = None if state is None else evaluated(state, ["abs_log_ratio_p99_9"])["abs_log_ratio_p99_9"]
            self._tails[steps[index]] = tail
        names = run.states.names
        nothing = np.full(len(names), math.nan)
        rows = [self._tails[steps[index]] for index in spread]
        columns = np.array([nothing if row is None else row for row in rows])
        return {name: columns[:, place] for place, name in enumerate(names)}, None if last is None else SliceStats(last)
