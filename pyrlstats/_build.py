"""What this installation consists of."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

from pyrlstats import _dispatch


def version() -> str:
    """The installed version, or "unknown" straight from a source tree."""
    try:
        return importlib.metadata.version("pyrlstats")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def build_info() -> dict[str, Any]:
    """Versions, backends that can run here and why the others cannot, and how the extension was built.

    Returns:
        ``{"version", "python", "platform", "packages": {name: version or None},
        "backends": {name: "available" or the reason}, "extension": {...} or None}``.
    """
    packages: dict[str, str | None] = {}
    for name in ("numpy", "torch", "triton", "numba"):
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = None
    extension = None
    if _dispatch.unavailable("cpp") is None:
        from pyrlstats import _core

        extension = _core.build_config()
    return {
        "version": version(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "backends": {name: _dispatch.unavailable(name) or "available" for name in _dispatch.BACKENDS},
        "extension": extension,
    }
