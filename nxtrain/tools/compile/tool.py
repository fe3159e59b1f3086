"""One call of `neuron_parallel_compile`: its command line, and the graphs in its log and results.

The tool runs a training command in which no computation is executed. It reads the graphs to compile from the lines that
Neuron's plugin prints, and compiles them in parallel. Its exit status is the number of failed graphs, modulo 256. The
status is 1 if the command failed, and 0 if the tool's own workers were killed. So the state of the graphs is read from
the cache, not from the status.

Source: AWS Neuron documentation, "Neuron Parallel Compile CLI"; the program itself, in torch-neuronx 2.6.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from nxtrain.backends.xla.environment import EXTRACTING, HOLDING
from nxtrain.tools.compile.entries import CacheKey, parse_key

TOOL = "neuron_parallel_compile"
STOP_S = 40.0
"""Timeout in seconds for the tool to end its processes when it is stopped; torchrun gives its ranks 30."""

Names = dict[CacheKey, str]
"""Part of the run that uses each graph, by key, in the order in which the graphs first appeared."""

_STAGES = re.compile(rf"{re.escape(HOLDING)} ([\d, ]+) of \d+")
_GRAPH = re.compile(r"(?:Extracting graphs \(|Using a cached neff at ).*?/(neuronxcc-[\w.+-]+)/(MODULE_[\w.+-]+)/model")


def tool_argv(tool: str, num_workers: int, folder: Path, command: Sequence[str]) -> tuple[str, ...]:
    """Build the command line of `neuron_parallel_compile` for a training command.

    The training command runs in the working directory of this process.

    Args:
        num_workers: Number of compiler processes at a time.
        folder: Folder of this call only, in which the tool must be started. The tool writes its results there. It
            deletes its working folder with all contents when it starts.
        command: Training command whose graphs are extracted.
    """
    options = ("--num_parallel", str(num_workers), "--parallel_compile_workdir", str(folder / "work"))
    return (tool, *options, "env", f"--chdir={Path.cwd()}", *command)


def run_tool(
    argv: Sequence[str], env: Mapping[str, str], folder: Path, watch: Callable[[], None], every_s: float = 2.0
) -> int:
    """Run `neuron_parallel_compile` until it ends; if this process is stopped, the tool is stopped too.

    The tool prints to this process's output.

    Args:
        folder: Working directory of the tool.
        watch: Called every `every_s` seconds.

    Returns:
        The tool's exit status; negative if a signal ended it.
    """
    env = {**env, "NEURON_PARALLEL_COMPILE_DUMP_RESULTS": "1"}
    # The log lines of a failed command must not count as its graphs.
    env.pop("NEURON_IGNORE_TRAINING_SCRIPT_ERROR_AND_COMPILE", None)
    with _signals_raise():
        process = subprocess.Popen(argv, cwd=folder, env=env, start_new_session=True)
        try:
            while process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(every_s)
                watch()
        finally:
            _end(process)
    return process.returncode


def log_file(folder: Path) -> Path:
    """Path of the training command's log in the folder of a tool call; missing until the command prints."""
    for path in (folder / "work").glob("trial_run_pid*_log.txt"):
        return path
    return folder / "work" / "trial_run_log.txt"


def read_log(folder: Path) -> str:
    """Text of the training command's log so far; empty if there is none."""
    try:
        return log_file(folder).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def compile_times(folder: Path) -> dict[CacheKey, float] | None:
    """Compile time in seconds of each graph, successful or not; None if the tool compiled no graph."""
    seconds: dict[CacheKey, float] | None = None
    for file in folder.glob(f"{TOOL}_results_*.json"):
        seconds = seconds or {}
        report = json.loads(file.read_text(encoding="utf-8"))["compilation_report"]
        for path, row in report.items():
            key = parse_key("/".join(Path(path).parts[-3:-1]))
            if key is not None:
                seconds[key] = float(row["compile_time"])
    return seconds


def names_in(log: str) -> Names:
    """Find the graphs in a log, named after the part of the run in which rank 0 first records each.

    Ranks that record new graphs wait for each other to compare them. So no rank is in another part of the run than rank
    0.
    """
    names: Names = {}
    work, numbers = "start", Counter[str]()
    for line in log.splitlines():
        if EXTRACTING in line:
            work = line.partition(EXTRACTING)[2].strip()
        for compiler, module in _GRAPH.findall(line):
            key = CacheKey(compiler, module)
            if key not in names:
                numbers[work] += 1
                names[key] = f"{work} #{numbers[work]}"
    return names


def stages_in(log: str) -> tuple[int, ...]:
    """Pipeline stages that a log reports for this machine; empty if the machine holds all stages."""
    match = _STAGES.search(log)
    if match is None:
        return ()
    return tuple(map(int, match[1].split(",")))


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Convert signals that end this process into exceptions, so that its child processes end first."""

    def exit_process(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    # Ignored signals stay ignored: nohup lets a job outlive its terminal.
    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, exit_process) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End `neuron_parallel_compile` and all processes it started, so that no compiler process outlives the tool."""
    with suppress(ProcessLookupError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
