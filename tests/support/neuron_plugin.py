"""A stand-in for Neuron's PJRT plugin: what it does with a graph, on the cache and on standard output.

It knows a graph by a hash that somebody gives it and runs none. Its key, its files, their order, its lock and the lines
that `neuron_parallel_compile` looks for are those of libneuronxla 2.

Source: AWS Neuron documentation, "Neuron Persistent Cache" and "Neuron Parallel Compile CLI"; logs of runs in issues.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from nxtrain.tools.compile.entries import DONE, LOCK, NEFF, CacheKey
from tests.support.caches import COMPILER, compile_now

CACHE_FLAGS = {"--cache_dir", "--no_cache", "--retry_failed_compilation", "--log_level", "--dump", "--compile_workdir"}
"""Flags of the cache, which the hash of the flags leaves out."""

PAUSE = "STAND_IN_COMPILE_PAUSE_S"
"""Variable: seconds for which the stand-in of the compiler leaves each of an entry's three files half written."""


class Plugin:
    """Plugin that one process loads.

    Args:
        environ: Its variables.
    """

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
