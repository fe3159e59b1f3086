"""The real NeuronX Distributed on CPU, with stand-ins for what it imports of AWS's and no machine here has.

`bash scripts/test.sh nxd --source DIR` runs the tests marked `nxd`: in an environment that has what NxD imports beside
torch-xla (tenacity, boto3, transformers==4.51.*), with the `src` of a checkout on PYTHONPATH.

Its own switch NXD_CPU_MODE=1 sends collectives to gloo; none of its code is replaced. The stand-ins answer every import
below torch_neuronx, libneuronxla, neuronxcc, nki and nkilib. Three names do something: the platform, the ring of ranks,
and decorators, which change nothing. To call any other raises.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
import types
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nxtrain.backends.neuron.sdk import installed

ROOTS = ("torch_neuronx", "libneuronxla", "neuronxcc", "nki", "nkilib")
PLATFORM = "NXD_TEST_PLATFORM"
"""Variable with the platform that NxD believes in; trn2 if it is not set."""

_DECORATORS = {"jit", "nki_jit", "hlo_debug", "skip_middle_end_transformations"}


def prepare(cpu_mode: bool = True) -> None:
    """Make NxD importable in this process, and known to importlib.metadata as if pip had installed it."""
    os.environ["NXD_CPU_MODE"] = str(int(cpu_mode))
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    os.environ.setdefault("NXD_LOG_LEVEL", "warning")
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())  # last: a true package wins
    if installed("neuronx-distributed"):
        return
    found = find_spec("neuronx_distributed")
    assert found is not None and found.origin is not None
    version: dict[str, str] = {}
    exec((Path(found.origin).parent / "_version.py").read_text(encoding="utf-8"), version)
    site = Path(tempfile.mkdtemp(prefix="nxd-metadata-"))
    atexit.register(shutil.rmtree, site, ignore_errors=True)
    info = site / f"neuronx_distributed-{version['__version__']}.dist-info"
    info.mkdir()
    text = f"Metadata-Version: 2.1\nName: neuronx-distributed\nVersion: {version['__version__']}\n"
    (info / "METADATA").write_text(text, encoding="utf-8")
    sys.path.append(str(site))


class CollectivesConfig:
    """Neighbours of each rank around the ring of every replica group, which NxD requests from neuronxcc."""

    def __init__(self, replica_groups: Sequence[Sequence[int]]) -> None:
        self.rank_src_tgt_pairs = {
            rank: list(zip(group, [*group[1:], group[0]], strict=True)) for group in replica_groups for rank in group
        }


def get_platform_target() -> str:
    """Name of the chip."""
    return os.environ.get(PLATFORM, "trn2")


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        root = fullname.partition(".")[0]
        # torch-xla looks for libneuronxla to learn whether it is on Trainium; until then there is none.
        hidden = root == "libneuronxla" and not hasattr(sys.modules.get("torch_xla"), "_found_libneuronxla")
        return ModuleSpec(fullname, _Loader(), is_package=True) if root in ROOTS and not hidden else None


class _Loader(Loader):
    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "torch_neuronx":
            import torch

            vars(torch.classes)["neuron"] = _Module("torch.classes.neuron")  # named in annotations


class _Module(types.ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        true = {"get_platform_target": get_platform_target, "CollectivesConfig": CollectivesConfig}
        value = true.get(name) or _placeholder(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Placeholder(type):
    """Type of the names that mean nothing: classes, so that annotations, subclasses and `isinstance` accept them."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _placeholder(f"{cls.__module__}.{cls.__name__}.{name}")

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls.__name__ in _DECORATORS:
            return args[0] if args and callable(args[0]) else lambda function: function
        if cls.__name__[:1].isupper():  # made at import, as a default value
            return type.__call__(cls)
        raise NotImplementedError(f"{cls.__module__}.{cls.__name__} is a stand-in")


def _placeholder(name: str) -> Any:
    module, _, leaf = name.rpartition(".")
    return _Placeholder(leaf, (), {"__module__": module})
