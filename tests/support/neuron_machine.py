"""A pretended Trainium machine, for one process or for all that a shell starts; the list of all its fakes.

Nothing of nxtrain is replaced but two paths. The fakes are:

- Packages: the metadata of torch-neuronx, neuronx-cc and libneuronxla, as pip installs them, without any code.
- Device nodes: `sdk.DEVICES` and the default argument of `hardware.this_machine` name a folder with the driver's files
  and with the name of the instance.
- The runtime: XLA:CPU in the place of Neuron's PJRT plugin (see `tests.support.neuron_runtime`). One rank runs its
  graphs there. Under extraction none runs, and what the host reads is 1. The hardware's stochastic rounding is the
  plain cast of XLA:CPU, to the nearest number.
- The world: XLA:CPU joins no processes. Of several ranks in processes, torch-xla gets rank and world from torchrun's
  variables, and none of their graphs runs, as under extraction. Or, with `LINK`, each collective is handed over to the
  hosts, and the graphs between them run (see `tests.support.xla_processes`).
- With `NXD`, what NeuronX Distributed imports of AWS's, and the NKI kernels that its flash attention calls (see
  `tests.support.nxd_cpu` and `nki_kernels`). Its layers and functions are its own.
- The compiler, its cache and `neuron_parallel_compile` (see `tests.support.neuron_machine` and `parallel_compile`).

Two modules of torch-xla whose names are imported and not used are empty, for speed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from nxtrain.tools.compile.entries import DONE, LOCK, NEFF, CacheKey
from tests.support import ROOT, leave_metadata
from tests.support.caches import COMPILER, compile_now
from tests.support.forked_python import play

CACHE_FLAGS = {"--cache_dir", "--no_cache", "--retry_failed_compilation", "--log_level", "--dump", "--compile_workdir"}
"""Flags of the cache, which the hash of the flags leaves out."""

PAUSE = "STAND_IN_COMPILE_PAUSE_S"
"""Variable: seconds for which the stand-in of the compiler leaves each of an entry's three files half written."""


class Plugin:
    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._root = Path(environ["NEURON_COMPILE_CACHE_URL"])
        flags = shlex.split(environ.get("NEURON_CC_FLAGS", ""))
        self._flags = [flag for flag in flags if flag.partition("=")[0] not in CACHE_FLAGS]
        self._extracts = bool(environ.get("NEURON_EXTRACT_GRAPHS_ONLY"))
        self._pause_s = float(environ.get(PAUSE, "0"))
        self._met: set[str] = set()
        if file := environ.get("NEURON_PARALLEL_COMPILE_CACHE_PATH_LOG"):
            Path(file).write_text(str(self._root), encoding="utf-8")

    def key(self, graph: str) -> CacheKey:
        """The key of a graph, whose hash is hexadecimal."""
        flags = hashlib.md5(" ".join(self._flags).encode()).hexdigest()[:8]
        return CacheKey(COMPILER, f"MODULE_{int(graph[:16], 16):020d}+{flags}")

    def meet(self, graph: str, text: str) -> None:
        """Have a graph ready to run, as a process does when it first reaches it."""
        if graph in self._met:
            return
        self._met.add(graph)
        key = self.key(graph)
        folder = self._root / key.compiler / key.module
        if (folder / DONE).exists():
            log("NEURON_CC_WRAPPER", f"Using a cached neff at {folder / NEFF}")
        elif self._extracts:
            folder.mkdir(parents=True, exist_ok=True)
            hlo = folder / "model.hlo_module.pb"
            hlo.write_text(text, encoding="utf-8")
            (folder / "compile_flags.json").write_text(json.dumps(self._flags), encoding="utf-8")
            what = f"Extracting graphs ({hlo}) for ahead-of-time parallel compilation. No compilation was done."
            log("NEURON_CC_WRAPPER", what)
        else:
            self._compile(folder)

    def _compile(self, folder: Path) -> None:
        """Compile a graph, or wait for whoever does, in this process: it holds the lock, and its child compiles."""
        folder.mkdir(parents=True, exist_ok=True)
        while not (folder / DONE).exists():
            try:
                os.close(os.open(folder / LOCK, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                log("NEURON_CACHE", f"Another process must be compiling {folder.name}")
                time.sleep(0.3)
                continue
            log("NEURON_CC_WRAPPER", f"Call compiler with cmd: neuronx-cc compile --framework=XLA {folder.name}")
            compile_now(folder, self._pause_s)
            (folder / DONE).touch()
            (folder / LOCK).unlink()


def log(who: str, text: str) -> None:
    """Print a line as libneuronxla does, in one write, since many ranks share a pipe."""
    now = time.strftime("%Y-%m-%d %H:%M:%S.000000", time.gmtime())
    sys.stdout.write(f"{now}:  {os.getpid()}  INFO ||{who}||: {text}\n")
    sys.stdout.flush()


def main(graphs: list[str]) -> None:
    """A script that reaches graphs; `fail` among them ends it, and a name with a colon is what it says it is at."""
    plugin = Plugin()
    for graph in graphs:
        if graph == "fail":
            sys.exit("this script fails")
        if graph.endswith(":"):
            print(f"extracting: {graph[:-1]}", file=sys.stderr, flush=True)
        else:
            plugin.meet(graph, f"HloModule {graph}")


if __name__ == "__main__":
    main(sys.argv[1:])


FOLDER = "PRETENDED_MACHINE"
"""Variable: the folder of the machine."""

INSTANCE = "trn1.2xlarge"

PACKAGES = {
    "torch-neuronx": "2.9.0.2.12.22436+0f1d",
    "neuronx-cc": "2.23.6484.0+3b612583",
    "libneuronxla": "2.2.15515.0+50c26cbd",
}
"""Packages of SDK 2.28.1."""

LINK = "PRETENDED_LINK"
"""Variable: set, ranks in several processes run their graphs, and the hosts carry what they send."""

NXD = "PRETENDED_NXD"
"""Variable: set, NeuronX Distributed is on the machine, from its source on PYTHONPATH."""

WITNESS = "witness"
"""Beginning of the names of the files of `neuron_runtime.Witness`."""


def witnesses(folder: Path) -> list[dict[str, Any]]:
    """Reports of the processes of a machine that had a graph."""
    return [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob(f"{WITNESS}-*"))]


def assert_real(folder: Path, processes: int, *, may_lack: int = 0) -> None:
    """Hold that so many processes had graphs, all of the classes that a Trainium gets."""
    result = witnesses(folder)
    assert processes - may_lack <= len(result) <= processes
    for item in result:
        assert item["is NeuronBackend"], item
        assert item["has NeuronKernels"], item


def install(folder: Path, instance: str = INSTANCE) -> dict[str, str]:
    """Set the machine up in a folder, and return the variables of a shell on it."""
    from tests.support.xla_processes import FAST  # with torch, which the emulated tools start without

    furnish(folder, instance)
    program = folder / "bin/neuron_parallel_compile"
    program.parent.mkdir()
    script = f'#!/bin/sh\nexec {sys.executable} -m tests.support.parallel_compile "$@"\n'
    program.write_text(script, encoding="ascii")
    program.chmod(0o755)
    names = ("NEURON", "XLA_", "PJRT_", "FI_", "PT_XLA", "OMP_NUM_THREADS", "MALLOC_ARENA_MAX", "RANK", "WORLD_SIZE")
    shell = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    paths = (str(ROOT / "tests/support/neuron_site"), str(ROOT), str(folder / "site"), shell.get("PYTHONPATH", ""))
    return {
        **shell,
        "PATH": f"{program.parent}{os.pathsep}{shell['PATH']}",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        FOLDER: str(folder),
        "XLA_FLAGS": FAST,
    }


def pretend() -> None:
    """Make this process one of the machine's; before torch-xla is imported."""
    folder = Path(os.environ[FOLDER])
    _show(folder)
    if NXD in os.environ:
        from tests.support import nxd_cpu

        os.environ.setdefault("PJRT_DEVICE", "NEURON")  # else the CPU, as those of other lanes want it
        nxd_cpu.prepare(cpu_mode=False)
        os.environ.setdefault(nxd_cpu.PLATFORM, "trn1")
    sys.meta_path.insert(0, _Afterwards("torch_xla", _start_runtime))
    leave_out_unused()


def leave_out_unused() -> None:
    """Let torch-xla load in half of the time, without two modules whose names are imported and not used."""
    for unused in ("torch_xla.stablehlo", "torch_xla.experimental.gru"):
        sys.modules[unused] = _Unused(unused)


def command(env: Mapping[str, str], *argv: str) -> NoReturn:
    """`nxtrain ARGV` on the machine that variables name, in a fork of a process that has imported torch-xla.

    The product executes itself again with the variables that a rank lacks, all before it imports torch-xla. What an
    import of torch-xla does with them is done when the product asks.
    """
    stand_on(Path(env[FOLDER]))
    sys.meta_path.insert(0, _Imported("torch_xla", sys.modules.pop("torch_xla"), _start_forked_runtime))
    play([sys.executable, "-m", "nxtrain", *argv], env)


def _start_forked_runtime() -> None:
    import torch_xla

    torch_xla._setup_default_env()
    torch_xla._setup_xla_flags()
    _start_runtime()


def rank_variables(rank: int, world: int, port: int, *, nodes: int = 1) -> dict[str, str]:
    """Variables that torchrun's agent gives a rank; the first machine holds the store at a port."""
    local = world // nodes
    placement: dict[str, object] = {"RANK": rank, "WORLD_SIZE": world}
    placement |= {"LOCAL_RANK": rank % local, "LOCAL_WORLD_SIZE": local}
    placement |= {"GROUP_RANK": rank // local, "GROUP_WORLD_SIZE": nodes, "TORCHELASTIC_RUN_ID": "none"}
    placement |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    placement |= {"TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return {name: str(value) for name, value in placement.items()}


def stand_on(folder: Path) -> None:
    """Let this process find packages and device nodes in a folder; devices and their runtime are the caller's."""
    sys.path.append(str(folder / "site"))
    _show(folder)


def furnish(folder: Path, instance: str = INSTANCE) -> None:
    """Lay out the packages and device nodes of a machine in a folder, which may have them."""
    from nxtrain.backends.neuron import hardware

    (folder / "dev").mkdir(parents=True, exist_ok=True)
    (folder / "dev/neuron0").touch()
    product = folder / "sys" / hardware.PRODUCT_NAME
    product.parent.mkdir(parents=True, exist_ok=True)
    product.write_text(f"{instance}\n", encoding="ascii")
    for name, version in PACKAGES.items():
        leave_metadata(folder / "site", name, version)


def _show(folder: Path) -> None:
    from nxtrain.backends.neuron import hardware, sdk

    sdk.DEVICES = folder / "dev"
    hardware.this_machine.__defaults__ = (folder / "sys",)


def _start_runtime() -> None:
    import torch_xla.runtime as xr

    from nxtrain.backends.xla.environment import extracting
    from nxtrain.backends.xla.graphs import freeze_older_objects
    from nxtrain.common.process.placement import Placement
    from tests.support.neuron_machine import Plugin
    from tests.support.neuron_runtime import Runtime, Witness

    os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1"}
    placement, linked = Placement.read(), LINK in os.environ
    if placement.world > 1:
        xr._WORLD_SIZE, xr._ORDINAL = placement.world, placement.rank
    if placement.world > 1 and linked:
        from tests.support.xla_processes import carry

        carry(placement)
    if NXD in os.environ:
        from tests.support import nki_kernels

        nki_kernels.install()
    freeze_older_objects()  # a look for what is pending would else pass by all of torch's
    met: set[str] = set()
    plugin, witness = Plugin(), Witness(Path(os.environ[FOLDER]) / f"{WITNESS}-{os.getpid()}.json")

    def meet(graph: str, text: Callable[[], str]) -> None:
        if graph not in met:
            met.add(graph)
            witness.testify()
            plugin.meet(graph, text())

    Runtime(meet, runs=(placement.world == 1 or linked) and not extracting(os.environ)).start()


class _Afterwards(MetaPathFinder):
    """Calls a function once a module has been imported."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name, self._then = name, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname == self._name else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader, self._then)
        return spec


class _Imported(MetaPathFinder, Loader):
    """Gives a module that a process had imported to the next import of it, and calls a function then."""

    def __init__(self, name: str, module: ModuleType, then: Callable[[], None]) -> None:
        self._name, self._module, self._then = name, module, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        return ModuleSpec(fullname, self, origin=self._module.__file__, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        spec.submodule_search_locations = [*self._module.__path__]
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        self._then()


class _Then(Loader):
    def __init__(self, loader: Loader, then: Callable[[], None]) -> None:
        self._loader, self._then = loader, then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._then()


class _Unused(ModuleType):
    """A module of names that are imported and not used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})
