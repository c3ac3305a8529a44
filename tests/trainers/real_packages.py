"""The functions of verl and OpenRLHF themselves, without what they need on a cluster.

Both want Ray, DeepSpeed and GPU builds at import, which the functions under test never touch: the package's own files
are loaded, unchanged, with empty stand-ins for those imports. They are looked for where Python looks, and in the folder
PYRLSTATS_TRAINERS, into which ``pip install --no-deps --target`` has put them. Nothing stays in ``sys.modules``.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

VERL_STUBS = {
    "ray": (),
    "tensordict": ("TensorDict",),
    "transformers": ("PreTrainedTokenizer",),
    "verl.protocol": ("DataProto",),
    "verl.trainer.config.algorithm": ("RolloutCorrectionConfig",),
    "verl.workers.config.actor": ("PolicyLossConfig",),
    "verl.utils.device": ("get_device_name", "get_torch_device"),
}
OPENRLHF_STUBS: dict[str, tuple[str, ...]] = {"deepspeed": ()}


class DataProto:
    """What verl wraps its weights in: here, their dictionary."""

    @staticmethod
    def from_dict(tensors: dict[str, Any]) -> dict[str, Any]:
        return tensors


class Package:
    """Modules of one installed package, importable only inside ``loaded()``."""

    def __init__(self, name: str, packages: Sequence[str], stubs: Mapping[str, Sequence[str]]) -> None:
        places = [os.environ["PYRLSTATS_TRAINERS"]] if os.environ.get("PYRLSTATS_TRAINERS") else []
        spec = importlib.machinery.PathFinder.find_spec(name, [*places, *sys.path])
        if spec is None or spec.origin is None:
            pytest.skip(f"{name} is not here: pip install --no-deps {name} (make test does so where CI is set)")
        root = Path(spec.origin).parent
        self.name = name
        self.modules: dict[str, types.ModuleType] = {}
        for stub, attributes in stubs.items():
            module = types.ModuleType(stub)
            for attribute in attributes:
                setattr(module, attribute, DataProto if attribute == "DataProto" else type(attribute, (), {}))
            self.modules[stub] = module
        for package in packages:  # their __init__ files would import the whole trainer
            module = types.ModuleType(package)
            module.__path__ = [str(root.parent / package.replace(".", "/"))]
            self.modules[package] = module

    @contextmanager
    def loaded(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name, module in self.modules.items():
                patch.setitem(sys.modules, name, module)
            patch.setattr(torch, "compile", lambda function: function)  # decorators at import would load its compiler
            yield
            for name in [name for name in sys.modules if name.startswith(f"{self.name}.")]:
                self.modules[name] = sys.modules.pop(name)

    def module(self, name: str) -> Any:
        with self.loaded():
            return importlib.import_module(name)


def verl() -> Package:
    folders = ["utils", "utils.debug", "utils.metric", "trainer", "trainer.ppo", "trainer.config", "workers"]
    packages = [f"verl.{folder}" for folder in (*folders, "workers.config")]
    return Package("verl", ["verl", *packages], VERL_STUBS)


def openrlhf() -> Package:
    return Package("openrlhf", ["openrlhf", "openrlhf.models"], OPENRLHF_STUBS)
