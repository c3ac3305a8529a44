"""Monitoring never takes a training run down: what could not be done is counted, and said once."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger("pyrlstats.integrations.trl")


class Failures:
    """Counts by what was being done. Each kind is logged once, with its traceback."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._said: set[str] = set()

    @contextmanager
    def caught(self, doing: str) -> Iterator[None]:
        try:
            yield
        except Exception:
            self.counts[doing] += 1
            if self.counts[doing] == 1:
                logger.warning(
                    "pyrlstats failed to %s. Training goes on; failures of this kind are only counted from now on.",
                    doing,
                    exc_info=True,
                )

    def say_once(self, level: int, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            logger.log(level, text)
