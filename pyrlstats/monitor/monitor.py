"""``Monitor``: watches a run step by step, tells once of each trouble, and never takes the run down."""

from __future__ import annotations

import logging
import os
import sys
import time
import zipfile
from collections import Counter, deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pyrlstats.monitor import snapshots
from pyrlstats.monitor.alerts import Alert, Rules
from pyrlstats.monitor.folder import RUN, RunReader, RunWriter
from pyrlstats.monitor.frozen import OtherSignals
from pyrlstats.monitor.settings import Settings
from pyrlstats.monitor.tails import Tails, taken
from pyrlstats.monitor.watcher import Watcher
from pyrlstats.monitor.worst import with_tokens
from pyrlstats.slice_stats import SliceStats

if TYPE_CHECKING:
    from pyrlstats.tails import TailShape, TopTokens

_log = logging.getLogger("pyrlstats.monitor")
_LOG_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "stop": logging.ERROR}
_MOST_ALERTS = 10_000  # kept in memory
_MOST_ARTIFACTS = 1_000  # folders of alerts written by a process


class Monitor:
    """Watches a run: detectors for every slice, rules over every signal, a folder that outlives the process.

    Call :meth:`observe` once a step with the statistics of all ranks together, on every rank: each decides alike
    without another collective. Rank 0 writes the folder and calls ``on_alert``; the rank is that of
    ``torch.distributed`` where it is initialised, else that of the environment variable ``RANK``, else 0.

    Call it from one thread. Nothing raises out of ``observe``. What could not be done is counted in ``lost`` and logged
    once a kind, as are alerts, by the logger "pyrlstats.monitor".

    Args:
        run_folder: where steps, alerts and their artifacts are kept; a folder that has some is continued exactly where
            the run was, by every rank: all must see it. None keeps nothing: then a run that goes back to an earlier
            step is not followed there.
        rules: asked at every step, beside the detectors; see :class:`~pyrlstats.monitor.alerts.Rules`.
        baseline: steps with statistics that are frozen as the baseline, 20 to 512. Growth is reported after them.
        skip: steps with statistics before the baseline that count for nothing, such as a warm-up.
        schedule: names of the scalar that is the learning rate; while it rises the baseline does not begin.
        false_warnings, false_stops: chance that growth is reported in 2,000 steps of a stationary run, over all slices
            and signals together.
        on_alert: called with each :class:`~pyrlstats.monitor.alerts.Alert`, such as a
            :class:`~pyrlstats.monitor.webhook.Webhook`.

    Raises:
        ValueError: settings outside their range.

    Attributes:
        lost: what could not be done, by kind, and how often.
    """

    def __init__(
        self,
        run_folder: str | Path | None = None,
        rules: Rules | None = None,
        *,
        baseline: int = 100,
        skip: int = 0,
        schedule: tuple[str, ...] = ("learning_rate", "lr"),
        false_warnings: float = 0.03,
        false_stops: float = 0.005,
        on_alert: Callable[[Alert], object] | None = None,
    ) -> None:
        self.settings = Settings(baseline, skip, tuple(schedule), false_warnings, false_stops)
        self.lost: Counter[str] = Counter()
        self._rules = rules
        self._on_alert = on_alert
        self._speaks = _rank() == 0
        self._path = None if run_folder is None else Path(run_folder)
        self._alerts: deque[Alert] = deque(maxlen=_MOST_ALERTS)
        self._stop = False
        self._artifacts = 0
        self._went_back = False
        self._writer: RunWriter | None = None
        self._watcher = Watcher(self.settings, rules, self._lose)
        self._closed = False
        if self._path is not None:
            self._open(self._path)

    def _open(self, path: Path) -> None:
        if self._speaks:
            try:
                self._writer = RunWriter(path, time.time())
                if self._writer.torn:
                    self.lost["torn lines"] += self._writer.torn
                    _log.warning("%s: a torn last line was cut off: its step was in flight", path)
            except (OSError, ValueError) as error:
                self._lose("run folder", error)
        try:
            if (path / RUN).exists():
                told = self._restore(path, None)
                self._tell(told)
        except Exception as error:
            self._lose("resuming", error)
            self._watcher = Watcher(self.settings, self._rules, self._lose)

    @property
    def alerts(self) -> list[Alert]:
        """Every alert of the run, those before a resume included, in the order told; the last 10,000."""
        return list(self._alerts)

    @property
    def should_stop(self) -> bool:
        """Whether this process has told an alert of level "stop".

        A process that resumes a run begins with False: whoever started it again has decided to go on.
        """
        return self._stop

    @property
    def frozen(self) -> bool:
        """Whether the baseline is complete, so that growth is reported."""
        return self._watcher.frozen is not None

    def observe(
        self,
        step: int,
        stats: SliceStats | None = None,
        scalars: Mapping[str, Any] | None = None,
        *,
        tails: TailShape | None = None,
        top_tokens: Mapping[str, TopTokens] | Callable[[], Mapping[str, TopTokens]] | None = None,
    ) -> list[Alert]:
        """Take one step; returns the alerts told at it. Never raises.

        A step that comes again, or one below the last, means that training went back to a checkpoint: the monitor goes
        back too, to where it was before that step (with a run folder; it reads up to some hundred steps).

        Args:
            step: its number.
            stats: reduced over ranks, of the same slices at every step; None where only scalars exist. Copied to the
                host once, as by ``to_dict``: syncs on a GPU.
            scalars: the trainer's own numbers (reward, loss, entropy, lengths), the same on every rank. Those on a
                device are copied together. What is no number is left out and counted.
            tails: of the same tokens and slices, with one ``sample_size`` at every step: Pareto k, whose growth is
                reported too. Copied to the host as by its ``to_dict``.
            top_tokens: of this step's tokens, as ``pyrlstats.tails.top_tokens`` returns it, for the alerts told at it:
                each gets the 10 worst tokens of its slice. A function is called only where there is one to tell; it
                must not communicate, as nothing here may hang, and so knows this rank's tokens alone.
        """
        try:
            return self._observe(int(step), stats, scalars or {}, tails, top_tokens)
        except Exception as error:
            self._lose("observe", error)
            return []

    def _observe(
        self,
        step: int,
        stats: SliceStats | None,
        scalars: Mapping[str, Any],
        tails: TailShape | None,
        top_tokens: Mapping[str, TopTokens] | Callable[[], Mapping[str, TopTokens]] | None,
    ) -> list[Alert]:
        if self._closed:
            raise RuntimeError("this monitor is closed")
        now = time.time()
        host = self._on_host(stats)
        numbers = self._numbers(scalars)
        far = self._far(tails, host)
        last = self._watcher.last_step
        told: list[Alert] = []
        if last is not None and step <= last:
            told += self._go_back(step, last)
        self._record(step, now, numbers, host, far)
        new = self._watcher.watch(step, host, numbers, far)
        if new and top_tokens is not None:
            try:
                new = with_tokens(new, top_tokens)
            except Exception as error:
                self._lose("top tokens", error)
        told += new
        self._tell(told)
        if self._watcher.rings.observed % snapshots.EVERY == 0:
            self._snapshot()
        return told

    def _on_host(self, stats: SliceStats | None) -> SliceStats | None:
        if stats is None:
            return None
        if not isinstance(stats, SliceStats):
            self._lose("statistics", TypeError(f"observe takes SliceStats or None, got {type(stats).__name__}"))
            return None
        state = stats.state.to_host()
        make = self._watcher.make
        if make is not None and (state.names, state.layout, state.clip) != make:
            error = ValueError(
                f"slices, layout and clip must stay {make}, got {(state.names, state.layout, state.clip)}"
            )
            self._lose("statistics", error)
            return None
        return SliceStats(state)

    def _far(self, tails: TailShape | None, stats: SliceStats | None) -> Tails | None:
        if tails is None:
            return None
        try:
            far = taken(tails, stats, self._watcher.tail_sample_size)
            cut = [name for name, reason in tails.reasons().items() if reason == "capacity"]
            if cut:
                self._lose("tails", ValueError(f"a capacity of {tails.capacity} is too small for k-hat of {cut}"))
            return far
        except Exception as error:
            self._lose("tails", error)
            return None

    def _numbers(self, scalars: Mapping[str, Any]) -> dict[str, float]:
        """Scalars as floats; tensors of one device in one copy."""
        numbers: dict[str, float] = {}
        tensors: dict[str, Any] = {}
        torch = sys.modules.get("torch")
        for name, value in scalars.items():
            if torch is not None and isinstance(value, torch.Tensor) and value.numel() == 1:
                tensors[str(name)] = value.detach().reshape(()).double()
                continue
            try:
                numbers[str(name)] = float(value)
            except (TypeError, ValueError, OverflowError):
                self._lose("scalars", TypeError(f"scalar {name!r} is no number: {value!r:.80}"))
        if tensors and torch is not None:
            numbers.update(zip(tensors, torch.stack(list(tensors.values())).tolist(), strict=True))
        return numbers

    def _record(
        self, step: int, now: float, numbers: Mapping[str, float], host: SliceStats | None, far: Tails | None
    ) -> None:
        if self._writer is None:
            if self._speaks and self._path is not None:
                self.lost["steps"] += 1
            return
        try:
            self._writer.append(step, now, numbers, None if host is None else host.state, SliceStats.kind, far)
        except (OSError, ValueError) as error:
            self._lose("steps", error)

    def _go_back(self, step: int, last: int) -> list[Alert]:
        if self._path is None:
            self._lose(
                "going back", ValueError(f"step {step} after step {last}: without a run folder it counts as new")
            )
            return []
        _log.log(
            logging.INFO if self._went_back else logging.WARNING,
            "step %d after step %d: the monitor goes back to where it was before it",
            step,
            last,
        )
        self._went_back = True
        if self._writer is not None:
            for kind, forget in (
                ("alerts", self._writer.back_to),
                ("snapshots", partial(snapshots.forget, self._writer)),
            ):
                try:
                    forget(step)
                except OSError as error:
                    self._lose(kind, error)
        try:
            return self._restore(self._path, step)
        except (OSError, ValueError) as error:
            self._lose("going back", error)
            return []

    def _restore(self, path: Path, before: int | None) -> list[Alert]:
        """Become what the monitor was after the last step (below ``before``); returns alerts that were never told."""
        watcher, start, after, other = Watcher(self.settings, self._rules, self._lose), 0, None, False
        for snapshot in snapshots.snapshots(path):
            if before is not None and snapshot.step >= before:
                continue
            try:
                watcher.restore(snapshot.file.read_bytes())
                start, after = snapshot.offset, snapshot.step
                break
            except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
                other = other or isinstance(error, OtherSignals)
                self._lose("snapshots", error)
                watcher = Watcher(self.settings, self._rules, self._lose)
        reader = RunReader(path, start)
        alerts = [alert for alert in reader.alerts if before is None or alert.step < before]
        known = {(alert.step, alert.key) for alert in alerts}
        untold: list[Alert] = []
        for record in reader.steps:
            if (after is None or record.step > after) and (before is None or record.step < before):
                told = watcher.watch(record.step, record.stats, record.scalars, record.tails)
                untold += [alert for alert in told if (alert.step, alert.key) not in known]
        if other and after is None:
            untold = []  # of signals that were not watched then: no news
            _log.warning("%s: recorded with other signals: its steps are watched anew, and what they tell is not", path)
        if reader.damaged:
            self.lost["damaged lines"] += reader.damaged
            _log.warning("%s: %d damaged lines were passed over", path, reader.damaged)
        self._watcher = watcher
        self._alerts = deque(alerts, _MOST_ALERTS)
        return untold

    def _tell(self, alerts: list[Alert]) -> None:
        for alert in alerts:
            self._alerts.append(alert)
            self._stop = self._stop or alert.level == "stop"
            if not self._speaks:
                continue
            _log.log(_LOG_LEVELS[alert.level], "%s at step %d: %s", alert.level, alert.step, alert.message)
            if self._writer is not None:
                try:
                    self._writer.append_alert(alert)
                except Exception as error:
                    self._lose("alerts", error)
                self._write_artifact(self._writer, alert)
            if self._on_alert is not None:
                try:
                    self._on_alert(alert)
                except Exception as error:
                    self._lose("on_alert", error)

    def _write_artifact(self, writer: RunWriter, alert: Alert) -> None:
        if self._artifacts >= _MOST_ARTIFACTS:
            self.lost["artifacts"] += 1
            return
        from pyrlstats.monitor.artifacts import write_artifact

        self._artifacts += 1
        try:
            write_artifact(writer, alert, self._watcher)
        except Exception as error:
            self._lose("artifacts", error)

    def _snapshot(self) -> None:
        if self._writer is None or self._watcher.last_step is None:
            return
        try:
            data = self._watcher.save()
            if data is not None:
                snapshots.write(self._writer, self._watcher.rings.observed, self._watcher.last_step, data)
        except Exception as error:
            self._lose("snapshots", error)

    def _lose(self, kind: str, error: Exception) -> None:
        self.lost[kind] += 1
        if self.lost[kind] == 1:
            _log.warning("monitor: %s: %s; training goes on, further ones are counted in .lost", kind, error)

    def close(self) -> None:
        """Write what resuming needs and let go of the folder. Never raises; a closed monitor observes nothing."""
        if self._closed:
            return
        self._closed = True
        self._snapshot()
        if self._writer is not None:
            try:
                self._writer.close()
            except OSError as error:
                self._lose("run folder", error)
            self._writer = None

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        last, told = self._watcher.last_step, len(self._alerts)
        return f"Monitor(last step {last}, {'watching' if self.frozen else 'warming up'}, {told} alerts)"


def _rank() -> int:
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        return int(torch.distributed.get_rank())
    try:
        return int(os.environ.get("RANK", "0"))
    except ValueError:
        return 0
