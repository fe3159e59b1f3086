"""An emulator of AWS's `neuron_parallel_compile` for machines without the Neuron SDK.

Like the real one it deletes its working folder when it starts, runs the command with `NEURON_EXTRACT_GRAPHS_ONLY=1`,
copies what that prints to its own output and to a log, takes the graphs from the log's lines, refuses torchrun's
--redirects, compiles in a pool whose workers pass over what is done or locked, and exits with the number of graphs that
failed, with 1 if the command failed, and with 0 if its pool broke. The compiler is that of `tests.support.caches`.

It knows no command but collect-and-compile, and one node.

Source: AWS Neuron documentation, "Neuron Parallel Compile CLI"; the program itself, in torch-neuronx 2.6.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from nxtrain.tools.compile.entries import DONE, LOCK, LOG
from tests.support.caches import compile_now
from tests.support.neuron_machine import PAUSE, log

FAULTS = "EMULATOR_FAULTS"
"""Variable: a folder of files, of which each makes one compilation go wrong as its name says after a hyphen."""

_LOGS = {
    "error": "Failed compilation with ['neuronx-cc', 'compile']: [NCC_EXTP003] Instructions generated 2064384\n",
    "memory": "Failed compilation with ['neuronx-cc', 'compile']:\n[F137] neuronx-cc was forcibly killed\n",
}


class Pool:
    def __init__(self, graphs: list[Path], num_workers: int) -> None:
        self._graphs, self._broken = sorted(graphs), False
        retries = "--retry_failed_compilation" in os.environ.get("NEURON_CC_FLAGS", "")
        self._old_failures = {graph.parent for graph in graphs if retries and (graph.parent / LOG).exists()}
        self.report: dict[str, dict[str, object]] = {}
        with ThreadPoolExecutor(num_workers) as workers:
            results = [workers.submit(self._work) for _ in range(num_workers)]
        for result in results:
            if self._broken:
                log("NEURON_PARALLEL_COMPILE", "sub-process got exception: A process in the pool was terminated")
            else:
                self.report |= result.result()

    def _work(self) -> dict[str, dict[str, object]]:
        done: dict[str, dict[str, object]] = {}
        for graph in self._graphs:
            folder, began = graph.parent, time.time()
            if self._broken or (folder / DONE).exists() or list(folder.glob("*.lock")) or self._has_failed(folder):
                continue
            try:
                os.close(os.open(folder / LOCK, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            self._old_failures.discard(folder)
            (folder / LOG).unlink(missing_ok=True)
            fault = _next_fault()
            if fault == "worker":  # the kernel has killed it: nobody gives the lock back
                self._broken = True
                continue
            log("NEURON_CC_WRAPPER", f"Call compiler with cmd: neuronx-cc compile model.{folder.name}.hlo_module.pb")
            if fault:
                (folder / LOG).write_text(_LOGS[fault], encoding="utf-8")
            else:
                compile_now(folder, float(os.environ.get(PAUSE, "0")))
                (folder / DONE).touch()
            (folder / LOCK).unlink()
            done[str(graph)] = {"status": not fault, "retry": 0, "compile_time": time.time() - began}
        return done

    def _has_failed(self, folder: Path) -> bool:
        """True if an entry has a failure that is not to be tried again, or not by this pool."""
        return (folder / LOG).exists() and folder not in self._old_failures


def main() -> int | None:
    parser = argparse.ArgumentParser(prog="neuron_parallel_compile")
    parser.add_argument("--command", choices=["collect-and-compile"], default="collect-and-compile")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    parser.add_argument("--num_parallel", type=int, default=math.ceil(memory / (64 << 30)))
    parser.add_argument("--node_id", type=int, default=0)
    parser.add_argument("--world_size", type=int)
    parser.add_argument("--static_schedule", action="store_true")
    user = os.getenv("USER", "no-user")
    parser.add_argument("--parallel_compile_workdir", type=Path, default=Path(f"/tmp/{user}/parallel_compile_workdir"))
    parser.add_argument("--log_level", choices=["INFO", "DEBUG", "ERROR", "WARNING"], default="INFO")
    options, command = parser.parse_known_args()
    workdir = options.parallel_compile_workdir
    if workdir.exists():
        shutil.rmtree(workdir)
    workdir.mkdir(parents=True)
    trial = workdir / f"trial_run_pid{os.getpid()}_log.txt"
    if _run(command, trial, workdir / f"cache_path_pid{os.getpid()}_log.txt"):
        log("NEURON_PARALLEL_COMPILE", "There was an error in the training script.")
        if not os.environ.get("NEURON_IGNORE_TRAINING_SCRIPT_ERROR_AND_COMPILE"):
            return 1
    lines = trial.read_text(encoding="utf-8", errors="ignore").splitlines()
    graphs = [Path(line.split("Extracting graphs (")[1].split(")")[0]) for line in lines if "Extracting graphs" in line]
    log("NEURON_PARALLEL_COMPILE", f"New graph list from script {len(graphs)}")
    if not graphs:
        return None
    began = time.time()
    report = Pool(graphs, options.num_parallel).report
    failed = sum(not row["status"] for row in report.values())
    results = {
        "compilation_summary": {"true": len(report) - failed, "false": failed},
        "compilation_report": report,
        "start_time": began,
        "compilation_time": time.time() - began,
    }
    if os.environ.get("NEURON_PARALLEL_COMPILE_DUMP_RESULTS"):
        name = f"neuron_parallel_compile_results_{time.time()}.json"
        Path(name).write_text(json.dumps(results, indent=4), encoding="utf-8")
    log("NEURON_PARALLEL_COMPILE", f"Total graphs: {len(report)}, failed compilations: {failed}")
    return failed


def _run(command: list[str], trial: Path, cache_log: Path) -> int:
    if "torchrun" in command and any("--redirect" in word for word in command):
        log("NEURON_PARALLEL_COMPILE", "neuron_parallel_compile is currently incompatible with torchrun redirect.")
        sys.exit(1)
    env = {**os.environ, "NEURON_EXTRACT_GRAPHS_ONLY": "1", "NEURON_PARALLEL_COMPILE_CACHE_PATH_LOG": str(cache_log)}
    env["PATH"] = f"/usr/sbin:/sbin:{env['PATH']}"
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env) as process,
        trial.open("wb") as file,
    ):
        assert process.stdout is not None
        while byte := process.stdout.read(1):
            sys.stdout.buffer.write(byte)
            sys.stdout.flush()
            file.write(byte)
    return process.returncode


def _next_fault() -> str:
    for file in sorted(Path(os.environ.get(FAULTS, os.devnull)).glob("*-*")):
        with suppress(FileNotFoundError):
            file.unlink()
            return file.name.partition("-")[2]
    return ""


if __name__ == "__main__":
    sys.exit(main())
