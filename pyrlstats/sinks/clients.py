"""Clients are imported where a sink is made; a missing one is named with its cure."""

from __future__ import annotations

import importlib
from typing import Any


def client(module: str, extra: str) -> Any:
    """The module of a client.

    Raises:
        ImportError: it is missing; the message has the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"this sink needs {module}: pip install 'pyrlstats[{extra}]'") from error
