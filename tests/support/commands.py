"""The command `nxtrain` in processes of its own that need not import anything, alone and as one rank."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock

import pytest
import torch

from nxtrain.checkpoint.convert import hf, nxd_read, nxd_write  # noqa: F401  # so that the processes need not import it
from nxtrain.cli import main as cli
from nxtrain.common.process.signals import STOPPING
from nxtrain.common.testing import faults  # noqa: F401
from nxtrain.common.testing.fault_points import VARIABLE
from nxtrain.data.loader import Batch, Loader
from nxtrain.train.command import train_on  # noqa: F401
from tests.support import forked_python, processes, runs
from tests.support.processes import Ended, Started, rank_variables

OUTPUT, ERRORS = "output.txt", "errors.txt"


def write_config(folder: Path, *, steps: int = 12, every: int = 4, num_rows: int = 18) -> Path:
    """A run of one rank and one block on random rows, every step logged."""
    model = {"config": {"num_hidden_layers": 1}}
    sections = {"model": {**runs.TINY["model"], **model}, "train": {"steps": steps}, "checkpoint": {"every": every}}
    return runs.write_toml(folder, num_rows=num_rows, **sections)


def context() -> ForkServerContext:
    """Starts processes that have imported what commands need."""
    return processes.context("tests.support.command_preload")


def play(argv: Sequence[str], environ: Mapping[str, str], first: Callable[[], object] | None = None) -> None:
    """Be a command in this process, which ends with the command; `first` is called before."""
    os.setsid()  # so that whatever it may start is known by its session
    heed_signals()
    os.environ.update(environ)
    torch.set_num_threads(1)
    sys.argv = ["nxtrain", *argv]
    if first is not None:
        first()
    cli.main()


def heed_signals() -> None:
    """Heed all signals, as under a terminal, whatever these tests were started to ignore."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_DFL)


def start(
    folder: Path, *argv: object, environ: Mapping[str, str] | None = None, first: Callable[[], object] | None = None
) -> ForkServerProcess:
    """Start a command, whose output is in a folder."""
    words = [*map(str, argv)]
    return processes.start(context(), folder / OUTPUT, play, words, dict(environ or {}), first).process


def command(
    folder: Path,
    *argv: object,
    environ: Mapping[str, str] | None = None,
    first: Callable[[], object] | None = None,
    within_s: float = 60.0,
) -> Ended:
    """The exit code of a command, and its output."""
    return Started(start(folder, *argv, environ=environ, first=first), folder / OUTPUT).ended(within_s)


def forked(
    folder: Path, *argv: object, environ: Mapping[str, str] | None = None, within_s: float = 250.0
) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command whose processes are forks, too."""
    errors = folder / ERRORS
    code, out = command(folder, *argv, environ=environ, first=partial(_as_program, errors), within_s=within_s)
    return code, out, errors.read_text(encoding="utf-8", errors="replace")


def _as_program(errors: Path) -> None:
    with errors.open("wb") as file:
        os.dup2(file.fileno(), 2)
    os.chdir(errors.parent)
    forked_python.command()


def in_process(*argv: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command in this process, which meets no defect."""
    code, out, err = outcome(*argv)
    assert "Traceback" not in err
    return code, out, err


def output_of(*argv: object, code: int = 0) -> str:
    """Standard output of a command in this process, which ends with an exit code."""
    result, printed, errors = in_process(*argv)
    assert result == code, errors
    return printed


def errors_of(*argv: object, code: int = 2) -> str:
    """Standard error of a command in this process, which ends with an exit code."""
    result, _, errors = in_process(*argv)
    assert result == code, errors
    return errors


def outcome(*argv: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command in this process, whatever it meets."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ),
        mock.patch.object(sys, "argv", ["nxtrain", *map(str, argv)]),
        mock.patch.object(sys, "excepthook", sys.__excepthook__),  # torch's process groups put rank numbers in front
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as end,
    ):
        # torch-xla, which other tests import, sets the variable, and `launch` would take the value for the user's.
        os.environ.pop("PJRT_DEVICE", None)
        cli.main()
    return int(end.value.code or 0), out.getvalue(), err.getvalue()


def train(folder: Path, *overrides: str, armed: str = "", first: Callable[[], object] | None = None) -> tuple[int, str]:
    """`nxtrain train` on the run of a folder, perhaps with faults."""
    environ = {VARIABLE: armed} if armed else {}
    return command(folder, "train", folder / runs.FILE, *overrides, environ=environ, first=first)


def trained(
    folder: Path, *overrides: str, code: int = 0, armed: str = "", first: Callable[[], object] | None = None
) -> str:
    """Output of `nxtrain train` on the run of a folder, which ends with an exit code."""
    result, output = train(folder, *overrides, armed=armed, first=first)
    assert result == code, output
    return output


def start_rank(
    folder: Path,
    number: int,
    port: int,
    *overrides: str,
    world: int = 2,
    host: str = "127.0.0.1",
    armed: str = "",
    environ: Mapping[str, str] | None = None,
    first: Callable[[], object] | None = None,
) -> ForkServerProcess:
    """Start one rank of the run of a folder, where rank 0 makes the store; its output is in a folder of its own."""
    (folder / str(number)).mkdir(exist_ok=True)
    cut = (f"parallel.dp={world}", f"train.global_batch={2 * world if world > 2 else 2}")
    variables = {**rank_variables(number, world, port, host), **({VARIABLE: armed} if armed else {})}
    return start(
        folder / str(number),
        "train",
        folder / runs.FILE,
        *cut,
        *overrides,
        environ={**variables, **(environ or {})},
        first=first,
    )


def ended(folder: Path, ranks: Mapping[int, BaseProcess], within_s: float) -> dict[int, str]:
    """Reports of the ranks, all of which end in time."""
    limit = time.monotonic() + within_s
    try:
        for process in ranks.values():
            process.join(max(0.0, limit - time.monotonic()))
        output = {number: (folder / str(number) / OUTPUT).read_text(encoding="utf-8") for number in ranks}
        assert not any(process.is_alive() for process in ranks.values()), output
    finally:
        for process in ranks.values():
            process.kill()
            process.join()
    return output


def at_batch(number: int, action: Callable[[], object]) -> None:
    """Do something in this process when the batch of a step is about to be read."""
    read = Loader.batch

    def struck(self: Loader, step: int) -> Batch:
        if step == number - 1:
            action()
        return read(self, step)

    Loader.batch = struck  # type: ignore[method-assign]
