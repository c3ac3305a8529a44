"""Modules of the source tree that no package installs."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any


def imported(name: str) -> Any:
    """The module, from the source tree, which does not stay on the path: child processes import what is installed."""
    root = str(Path(__file__).parents[1])
    sys.path.insert(0, root)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(root)
