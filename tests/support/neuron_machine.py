"""A stand-in for a Trainium machine: what is installed there, and a backend whose graphs are traced and never run.

Ranks are real processes under a real torchrun, with the commands of the product. Only what no machine here has is
replaced: the device files, the list of packages, the plugin, and the device, whose values are all 1.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
DEVICES = "STAND_IN_DEVICES"
"""Variable: the folder that has the device files."""

PACKAGES = {
    "torch-neuronx": "2.9.0.2.12.22436+0f1d",
    "neuronx-cc": "2.23.6484.0+3b612583",
    "libneuronxla": "2.2.15515.0+50c26cbd",
}
"""Those of SDK 2.28.1."""


def install(folder: Path) -> dict[str, str]:
    """Set the machine up in a folder, and return the variables of a shell on it."""
    (folder / "dev").mkdir()
    (folder / "dev/neuron0").touch()
    program = folder / "bin/neuron_parallel_compile"
    program.parent.mkdir()
    script = f'#!/bin/sh\nexec {sys.executable} -m tests.support.parallel_compile "$@"\n'
    program.write_text(script, encoding="ascii")
    program.chmod(0o755)
    names = ("NEURON", "XLA_", "PJRT_", "FI_", "PT_XLA", "OMP_NUM_THREADS", "MALLOC_ARENA_MAX", "RANK", "WORLD_SIZE")
    shell = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    paths = (str(ROOT / "tests/support/neuron_site"), str(ROOT), shell.get("PYTHONPATH", ""))
    return {
        **shell,
        "PATH": f"{program.parent}{os.pathsep}{shell['PATH']}",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        DEVICES: str(folder / "dev"),
    }


def pretend() -> None:
    """Replace, in this process, what tells a Trainium machine."""
    from nxtrain.backends.neuron import sdk

    real = sdk.installed

    def installed(name: str) -> sdk.Package | None:
        return sdk.Package(name, PACKAGES[name]) if name in PACKAGES else real(name)

    sdk.DEVICES = Path(os.environ[DEVICES])
    sdk.installed = installed
    sys.modules["nxtrain.backends.neuron.backend"] = _Backend("nxtrain.backends.neuron.backend")
    for unused in (
        "torch_xla.stablehlo",
        "torch_xla.experimental.gru",
    ):  # half of the time that torch-xla takes to load
        sys.modules[unused] = _Unused(unused)


class _Unused(ModuleType):
    """A module of names that are imported and not used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Backend(ModuleType):
    """The module of the Neuron backend, with the stand-in in it; torch is imported when it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name != "NeuronBackend":
            raise AttributeError(name)
        return _backend()


def _backend() -> Callable[..., Any]:
    from nxtrain.backends.base import Support
    from nxtrain.backends.c10d import Placement
    from nxtrain.backends.neuron import sdk
    from nxtrain.backends.shell import extracting
    from nxtrain.backends.tracing import TracingBackend
    from tests.support.neuron_plugin import Plugin

    class Tape:
        def __init__(self) -> None:
            self._plugin = Plugin()

        def graph(self, hash_: str, text: Callable[[], str]) -> None:
            self._plugin.meet(hash_, text())

        def host_read(self, file: str, line: int, function: str) -> None:
            pass

    class StandInBackend(TracingBackend):
        name = "neuron"

        def __init__(self, *, hang_timeout_s: float = 1800.0) -> None:
            os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1"}
            place = Placement.read()
            super().__init__(place.world, place.rank, Tape())
            self.extracts = extracting(os.environ)
            self._stack = ExitStack()
            self._stack.enter_context(self.recording())

        @staticmethod
        def support() -> Support:
            return sdk.support()

        def close(self) -> None:
            self._stack.close()
            super().close()

    return StandInBackend
