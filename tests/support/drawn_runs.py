"""Drawn runs beside their reference, transformers with `torch.optim` on one process.

The reference computes in float64, from the same float32 weights: in float32 it is itself up to 2.4e-6 from that where
a batch has two tokens, farther than our runs in float32 are.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from nxtrain.backends import open_backend
from nxtrain.backends.base import Backend
from nxtrain.backends.cpu import CpuBackend
from nxtrain.common.run_folder import METRICS_FILE
from nxtrain.train.build import build_mesh
from tests.support import fake_neuron
from tests.support.drawn import (
    CONFIG,
    ON_TORCHNEURON,
    ONE,
    ROOT,
    Degrees,
    Drawn,
    covering_array,
    draw,
    is_for_xla,
    on_torchneuron,
)
from tests.support.drawn_fp16 import WORSE, differences, distances, draw_fp16
from tests.support.drawn_fp16 import run as run_fp16
from tests.support.models import hf_model, weights_of
from tests.support.parity import Course, max_weight_error, reference, run_ours
from tests.support.ranks import RankPool
from tests.support.xla_bodies import drawn_courses
from tests.support.xla_engine import run_devices

LOSS, NORM, WEIGHT = 2e-6, 1e-5, 2e-5
"""Largest differences in float32: of a loss, of a norm in parts of the reference's, and of a weight."""


@dataclass(frozen=True)
class Error:
    """Largest differences of a run from its reference, over all steps and ranks."""

    loss: float
    norm: float
    weight: float

    @property
    def is_parity(self) -> bool:
        """True within the tolerances; a difference that is no number is beyond them."""
        return self.loss <= LOSS and self.norm <= NORM and self.weight <= WEIGHT

    def __str__(self) -> str:
        return f"loss {self.loss:.1e}, norm {self.norm:.1e}, weight {self.weight:.1e}"


def first_weights(drawn: Drawn) -> dict[str, Tensor]:
    """Whole weights at step 0, by global name; activations neither vanish nor saturate at any width."""
    resolved = drawn.resolved
    return weights_of(resolved, std=0.4 / math.sqrt(resolved.model.hidden_size))


def wanted(drawn: Drawn, weights: Mapping[str, Tensor] | None = None) -> Course:
    """The course of the reference; None: from the first weights of the draw."""
    first = first_weights(drawn) if weights is None else weights
    return reference(drawn.resolved, drawn.steps, data=drawn.batches(), weights=first)


def ours(backend: Backend, drawn: Drawn, weights: dict[str, Tensor]) -> Course:
    """The course of one rank."""
    if isinstance(backend, CpuBackend):
        backend.choose_transport(drawn.resolved.config.backend.cpu_transport)
    return run_ours(backend, drawn.resolved, drawn.steps, weights, drawn.batches())


def error_of(courses: Sequence[Course], want: Course, drawn: Drawn) -> Error:
    """Hold the courses of all ranks against the reference."""
    loss, norm, weight = 0.0, 0.0, 0.0
    for rank, course in enumerate(courses):
        mesh = build_mesh(drawn.resolved, len(courses), rank, len(courses))
        loss = max([loss, *(abs(a - b) for a, b in zip(course.losses, want.losses, strict=True))], key=_worse)
        norm = max([norm, *(abs(a / b - 1) for a, b in zip(course.norms, want.norms, strict=True))], key=_worse)
        weight = max(weight, max_weight_error(course, want, drawn.resolved, mesh), key=_worse)
    return Error(loss, norm, weight)


def _worse(x: float) -> float:
    return math.inf if math.isnan(x) else x


def failures(errors: Sequence[tuple[Drawn, Error]]) -> str:
    """A line for each run beyond the tolerances, with the command that repeats the run."""
    return "\n".join(f"{error}: {drawn.reproduce}" for drawn, error in errors if not error.is_parity)


LIMIT_S = 180


def prepare(drawn: Drawn, folder: Path) -> list[str]:
    """Write the model and the data of a run, and return the command that trains it."""
    drawn = unmasked(drawn)
    hf_model(drawn.resolved, weights=first_weights(drawn)).save_pretrained(folder / "model")
    rows = [torch.cat([inputs, targets[:, -1:]], dim=1) for inputs, targets in drawn.batches()]
    np.save(folder / "rows.npy", torch.cat(rows).numpy().astype(np.uint16))
    shape = [line for line in drawn.overrides if not line.startswith(("model.config.", "model.family=", "data.path="))]
    own = {
        "run.dir": folder / "run",
        "data.path": folder / "rows.npy",
        "model.preset": '""',
        "model.hf": folder / "model",
        "model.init": "hf",
        "train.steps": drawn.steps,
        "metrics.log_every": 1,
        "metrics.progress": "false",
        "metrics.tensorboard": "false",
        "checkpoint.every": 0,
    }
    overrides = [*shape, *(f"{key}={value}" for key, value in own.items())]
    return ["nxtrain", "launch", str(CONFIG.relative_to(ROOT)), *overrides, "--nproc", str(drawn.degrees.world)]


def unmasked(drawn: Drawn) -> Drawn:
    """The same run on data whose targets all count, as token files have them."""
    return replace(drawn, mask=0.0)


def run_command(argv: list[str]) -> None:
    """Run a command of `prepare`.

    Raises:
        AssertionError: The command fails.
    """
    program = [sys.executable, "-m", *argv]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(program, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, f"{shlex.join(argv)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def error_of_command(drawn: Drawn, folder: Path) -> Error:
    """Hold the records of a finished command against the reference."""
    lines = (folder / "run" / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["step"] for record in records] == list(range(1, drawn.steps + 1))
    found = Course([record["loss"] for record in records], [record["grad_norm"] for record in records], {})
    want = wanted(unmasked(drawn))
    loss = max(abs(a - b) for a, b in zip(found.losses, want.losses, strict=True))
    norm = max(abs(a / b - 1) for a, b in zip(found.norms, want.norms, strict=True))
    return Error(loss, norm, 0.0)


LAYOUTS = 64
"""Of a covering array; later draws begin it again with other shapes."""

NOT_BY_COMMAND = {
    "native": "no command reaches the stand-in of TorchNeuron: leave out --command",
    "fp16": "the reference of fp16 follows decisions that no command records: leave out --command",
}
"""Lanes whose runs no command repeats, with the reason."""


class Lanes:
    """Draws and checks runs; a context that ends the processes.

    Args:
        seed: Draws everything.
        folder: For the files of runs.
    """

    def __init__(self, seed: int, folder: Path) -> None:
        torch.set_num_threads(1)
        self._seed, self._folder = seed, folder
        self._layouts: dict[str, Sequence[Degrees]] = {
            "gloo": covering_array(seed, LAYOUTS),
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
        """Run a draw; the differences from the reference in words.

        Raises:
            AssertionError: They are beyond the tolerances, or the run fails.
        """
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
        if drawn.lane == "process":
            return [ours(self._backend, drawn, weights)]
        if drawn.lane == "gloo":
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
