"""``python -m benchmarks``: the suite straight from a source tree."""

from .cli import app

if __name__ == "__main__":
    app()
