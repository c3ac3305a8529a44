"""``python -m benchmarks``: the suite straight from a source tree."""

from benchmarks.cli import app

app()
