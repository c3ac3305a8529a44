"""An ``on_alert`` that posts alerts as JSON, from a thread of its own: training never waits for a server."""

from __future__ import annotations

import json
import logging
import queue
import threading
import urllib.request
from collections.abc import Callable
from typing import Any

from pyrlstats.monitor.alerts import Alert

_WAITING = 100  # alerts; more are dropped
_log = logging.getLogger("pyrlstats.monitor")


class Webhook:
    """Posts every alert to a URL.

    Args:
        url: http or https.
        body: JSON values made from an alert; by default ``{"text": "stop at step 120: ..."}`` and ``"alert"``, all its
            fields, which chat services show as they are.
        timeout: seconds a post may take.

    Raises:
        ValueError: another kind of URL.

    Attributes:
        failed: alerts that could not be posted; the first is logged.
    """

    def __init__(self, url: str, body: Callable[[Alert], Any] | None = None, timeout: float = 10.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url must start with http:// or https://, got {url!r}")
        self.failed = 0
        self._url, self._timeout = url, timeout
        self._body = body or _body
        self._queue: queue.Queue[Alert] = queue.Queue(_WAITING)
        self._thread: threading.Thread | None = None

    def __call__(self, alert: Alert) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._post_all, name="pyrlstats-webhook", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(alert)
        except queue.Full as error:
            self._fail(error)

    def wait(self) -> None:
        """Return when everything so far has been posted or has failed."""
        self._queue.join()

    def _post_all(self) -> None:
        while True:
            alert = self._queue.get()
            try:
                data = json.dumps(self._body(alert)).encode()
                request = urllib.request.Request(self._url, data, {"Content-Type": "application/json"})
                with urllib.request.urlopen(request, timeout=self._timeout):
                    pass
            except Exception as error:
                self._fail(error)
            finally:
                self._queue.task_done()

    def _fail(self, error: Exception) -> None:
        self.failed += 1
        if self.failed == 1:
            _log.warning("an alert could not be posted, further ones are counted in .failed: %r", error)


def _body(alert: Alert) -> Any:
    return {"text": f"{alert.level} at step {alert.step}: {alert.message}", "alert": alert.to_json()}
