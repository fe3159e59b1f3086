"""Every lane of drawn runs behind one door, for as many as one likes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import torch

from nxtrain.backends import open_backend
from tests.support import fake_neuron
from tests.support.drawn import Drawn, draw
from tests.support.drawn_fp16 import WORSE, differences, distances, draw_fp16
from tests.support.drawn_fp16 import run as run_fp16
from tests.support.drawn_runs import (
    ON_TORCHNEURON,
    Error,
    error_of,
    error_of_command,
    first_weights,
    on_torchneuron,
    ours,
    prepare,
    run_command,
    wanted,
)
from tests.support.layouts import ONE, Degrees, covering_array, is_for_xla
from tests.support.models import weights_of
from tests.support.parity import Course
from tests.support.ranks import RankPool
from tests.support.xla_bodies import drawn_courses
from tests.support.xla_engine import run_devices

LAYOUTS = 64
"""Of a covering array; later draws begin it again with other shapes."""

NOT_BY_COMMAND = {
    "native": "no command reaches the stand-in of TorchNeuron: leave out --command",
    "fp16": "the reference of fp16 follows decisions that no command records: leave out --command",
}
"""Lanes whose runs no command repeats, with the reason."""


class Lanes:
    """Draws and checks runs; a context that ends the processes."""

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
            "command": covering_array(seed + 1, LAYOUTS, lambda degrees: degrees.world <= 4),
        }
        self._backend, self._ranks = open_backend("cpu"), RankPool()
        self._native = RankPool("neuron-native", fake_neuron.install)

    def __enter__(self) -> Lanes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ranks.close()
        self._native.close()

    def draw(self, lane: str, index: int) -> Drawn:
        """One run of a lane, the same that the lane's test draws."""
        layouts = self._layouts.get(lane, [ONE])
        drawn = draw(lane, self._seed, index, layouts[index % len(layouts)], bf16=lane == "bf16", xla=lane == "xla")
        return on_torchneuron(drawn) if lane == "native" else drawn

    def check(self, drawn: Drawn, *, by_command: bool) -> str:
        """Run a draw; the differences from the reference in words."""
        if by_command or drawn.lane == "command":
            assert drawn.lane not in NOT_BY_COMMAND, NOT_BY_COMMAND[drawn.lane]
            return self._by_command(drawn)
        if drawn.lane == "bf16":
            own, theirs = distances(self._backend, drawn)
            said = f"gradient {own.gradient:.1e} beside {theirs.gradient:.1e}"
            assert own.gradient <= WORSE * theirs.gradient, said
            return said
        if drawn.lane == "fp16":
            resolved = draw_fp16(drawn.lane, drawn.seed, drawn.index, drawn.degrees)
            courses = self._ranks.run(drawn.degrees.world, run_fp16, resolved, weights_of(resolved))
            return differences(courses, resolved)
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
        return [found for (found,) in run_devices(world, drawn_courses, [(drawn, weights)], folder=self._folder)]

    def _by_command(self, drawn: Drawn) -> str:
        folder = self._folder / f"{drawn.lane}-{drawn.index}"
        folder.mkdir()
        run_command(prepare(drawn, folder))
        error: Error = error_of_command(drawn, folder)
        assert error.is_parity, str(error)
        return f"by `nxtrain launch`: {error}"
