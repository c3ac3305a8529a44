"""``python -m benchmarks``: the suite straight from a source tree."""

from benchmarks.cli import app

if __name__ == "__main__":
    app()
