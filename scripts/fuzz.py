"""Fuzz test: draw random runs from a seed, and compare each with transformers and `torch.optim`.

Usage: `python scripts/fuzz.py SEED N`. Lanes: `process` (one process, float32), `bf16` (one process), `gloo` (one
process per rank, all layouts), `fp16` (the same in fp16, compared with torch's gradient scaler), `native` (on a mock of
TorchNeuron), `xla` (devices of torch-xla on this CPU), `ramps` (of batch and sequence length, across a checkpoint) and
`command` (`nxtrain launch`). A failure prints the command that repeats the run; with `--command` the run uses `nxtrain
launch`. The exit code is 0 if all runs agree, and 1 otherwise.
"""

# ruff: noqa: E402 - the tests are importable once the path names them

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import torch

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # for this process, and for those that it starts
    sys.path.insert(0, str(ROOT))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

from nxtrain.backends import open_backend
from tests.support import fake_neuron
from tests.support.drawn import Drawn, draw
from tests.support.drawn_fp16 import WORSE, differences, distances, draw_fp16
from tests.support.drawn_fp16 import run as run_fp16
from tests.support.drawn_runs import (
    ON_TORCHNEURON,
    Error,
    across_a_checkpoint,
    error_of,
    error_of_command,
    first_weights,
    on_torchneuron,
    ours,
    prepare,
    run_command,
    wanted,
    written,
)
from tests.support.layouts import ONE, Degrees, covering_array, is_for_xla, ramped_layouts
from tests.support.models import weights_of
from tests.support.parity import Course
from tests.support.ranks import RankPool
from tests.support.xla_bodies import drawn_courses
from tests.support.xla_engine import run_devices

LANES = (
    "process",
    "bf16",
    "gloo",
    "cp",
    "mixtures",
    "process-mixtures",
    "ep-mixtures",
    "fp16",
    "native",
    "xla",
    "ramps",
    "command",
)
LAYOUTS = 64
"""Number of layouts in a covering array; later draws repeat the layouts with other model shapes."""

COMMAND_RANKS = 4
"""Most ranks of a run that is started by `nxtrain launch`."""

NOT_BY_COMMAND = {
    "native": "no command reaches the stand-in of TorchNeuron: leave out --command",
    "fp16": "the reference of fp16 follows decisions that no command records: leave out --command",
}
"""Lanes whose runs `nxtrain launch` cannot repeat, with the reason."""


class Runs:
    """Generator and checker of random runs; a context manager that ends the rank processes."""

    def __init__(self, seed: int, folder: Path) -> None:
        torch.set_num_threads(1)
        self._seed, self._folder = seed, folder
        self._layouts: dict[str, Sequence[Degrees]] = {
            "gloo": covering_array(seed, LAYOUTS),
            "cp": covering_array(seed, LAYOUTS, cp=True),
            "mixtures": [*covering_array(seed + 1, LAYOUTS), *covering_array(seed + 1, 48, cp=True)],
            "ep-mixtures": covering_array(seed, 48, ep=True),
            "fp16": covering_array(seed, LAYOUTS),
            "native": [*ON_TORCHNEURON, *covering_array(seed, LAYOUTS)],
            "xla": covering_array(seed, 12, is_for_xla),
            "ramps": ramped_layouts(seed),
            "command": covering_array(seed + 1, LAYOUTS, lambda degrees: degrees.world <= COMMAND_RANKS),
        }
        self._backend, self._ranks = open_backend("cpu"), RankPool()
        self._native = RankPool("neuron-native", fake_neuron.install)

    def __enter__(self) -> Runs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ranks.close()
        self._native.close()

    def draw(self, lane: str, index: int) -> Drawn:
        """Draw a run of a lane, equal to the run that the lane's test draws."""
        layouts = self._layouts.get(lane, [ONE])
        drawn = draw(lane, self._seed, index, layouts[index % len(layouts)], bf16=lane == "bf16", xla=lane == "xla")
        return on_torchneuron(drawn) if lane == "native" else drawn

    def check(self, drawn: Drawn, *, by_command: bool) -> str:
        """Execute a drawn run, compare it with the reference, and describe the differences.

        Raises:
            AssertionError: The differences exceed the tolerance.
        """
        if by_command or drawn.lane == "command":
            assert drawn.lane not in NOT_BY_COMMAND, NOT_BY_COMMAND[drawn.lane]
            return self._by_command(drawn)
        if drawn.lane == "bf16":
            own, theirs = distances(self._backend, drawn)
            said = f"gradient {own.gradient:.1e} compared with {theirs.gradient:.1e}"
            assert own.gradient <= WORSE * theirs.gradient, said
            return said
        if drawn.lane == "fp16":
            resolved = draw_fp16(drawn.lane, drawn.seed, drawn.index, drawn.degrees)
            courses = self._ranks.run(drawn.degrees.world, run_fp16, resolved, weights_of(resolved))
            return differences(courses, resolved)
        if drawn.lane == "ramps":
            folder = self._folder_of(drawn)
            self._ranks.run(drawn.degrees.world, across_a_checkpoint, drawn, written(drawn, folder))
            error = error_of_command(drawn, folder)
        else:
            error = error_of(self._courses(drawn), wanted(drawn), drawn)
        assert error.is_parity, str(error)
        return str(error)

    def _courses(self, drawn: Drawn) -> list[Course]:
        weights, world = first_weights(drawn), drawn.degrees.world
        if drawn.lane in ("process", "process-mixtures"):
            return [ours(self._backend, drawn, weights)]
        if drawn.lane in ("gloo", "cp", "mixtures", "ep-mixtures"):
            return self._ranks.run(world, ours, drawn, weights)
        if drawn.lane == "native":
            return self._native.run(world, ours, drawn, weights)
        return [course for (course,) in run_devices(world, drawn_courses, [(drawn, weights)], folder=self._folder)]

    def _folder_of(self, drawn: Drawn) -> Path:
        folder = self._folder / f"{drawn.lane}-{drawn.index}"
        folder.mkdir()
        return folder

    def _by_command(self, drawn: Drawn) -> str:
        folder = self._folder_of(drawn)
        run_command(prepare(drawn, folder))
        error: Error = error_of_command(drawn, folder)
        assert error.is_parity, str(error)
        return f"by `nxtrain launch`: {error}"


def main() -> None:
    """Parse the command line, and execute the requested runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int, metavar="SEED", help="draws the runs")
    parser.add_argument("number", type=int, nargs="?", default=20, metavar="N", help="runs of each lane (20)")
    parser.add_argument(
        "--lane", action="append", choices=LANES, help="only this lane; may be repeated (all but command)"
    )
    parser.add_argument("--only", metavar="LANE:INDEX", help="only this run")
    parser.add_argument("--command", action="store_true", help="run through `nxtrain launch`")
    options = parser.parse_args()

    wanted: list[tuple[str, int]]
    if options.only:
        lane, _, index = options.only.partition(":")
        if lane not in LANES or not index.isdecimal():
            parser.error(f"--only {options.only}: write LANE:INDEX, with LANE one of {', '.join(LANES)}")
        wanted = [(lane, int(index))]
    else:
        lanes = options.lane or LANES[:-1]
        wanted = [(lane, index) for index in range(options.number) for lane in lanes]
    with tempfile.TemporaryDirectory(prefix="nxtrain-fuzz-") as folder, Runs(options.seed, Path(folder)) as runs:
        failed = sum(not _run(runs, runs.draw(*one), options.command) for one in wanted)
    print(f"{len(wanted) - failed} passed, {failed} failed", flush=True)
    sys.exit(1 if failed else 0)


def _run(runs: Runs, drawn: Drawn, by_command: bool) -> bool:
    """Execute one drawn run and print its result; return True if it agrees with the reference."""
    begin = time.monotonic()
    try:
        error = runs.check(drawn, by_command=by_command)
        verdict = f"ok    {error}"
    except Exception as failure:
        verdict = f"FAIL  {failure}\n      {drawn.reproduce}\n      {shlex.join(drawn.overrides)}"
    print(f"{drawn!s:14} {drawn.degrees!s:32} {time.monotonic() - begin:6.1f} s  {verdict}", flush=True)
    return verdict.startswith("ok")


if __name__ == "__main__":
    main()
