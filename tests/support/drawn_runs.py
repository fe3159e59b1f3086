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
from random import Random
from typing import TypeVar
from unittest import mock

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.backends.cpu import CpuBackend
from nxtrain.common.run_folder import METRICS_FILE
from nxtrain.config.check import resolve_config
from nxtrain.config.load import load
from nxtrain.config.tables import toml_value
from nxtrain.data.tokenization import END_OF_TEXT
from nxtrain.train.build import build_mesh
from nxtrain.train.command import train_on
from nxtrain.train.context import RunContext
from tests.support import ROOT, TINY
from tests.support.drawn import Drawn
from tests.support.drawn_schedules import END_ID
from tests.support.layouts import Degrees
from tests.support.models import hf_model, weights_of
from tests.support.parity import Course, max_weight_error, reference, run_ours

LOSS, NORM, WEIGHT = 2e-6, 1e-5, 2e-5
"""Largest differences in float32: of a loss, of a norm in parts of the reference's, and of a weight."""

LEAST_NORM = 1e-2
"""Norm below which differences count as if the reference's were this: gradients that cancel leave their rounding."""


AnyDrawn = TypeVar("AnyDrawn", bound=Drawn)

ON_TORCHNEURON = (
    Degrees(pp=2, schedule="zero_bubble"),
    Degrees(tp=2, pp=2, virtual_pp=2, sequence_parallel=True),
    Degrees(dp=2, shard="zero1"),
    Degrees(dp=2, shard="grad_op"),
    Degrees(dp=2, shard="full"),
    Degrees(pp=2, dp=2, shard="hybrid"),
)
"""Layouts of the lane of TorchNeuron that come first: every way to shard, both schedules, and several stages a rank."""


def on_torchneuron(drawn: AnyDrawn) -> AnyDrawn:
    """The same run on TorchNeuron, which has one transport between ranks and no offload."""
    absent = ("backend.name", "backend.cpu_transport", "parallel.offload")
    kept = [line for line in drawn.overrides if line.partition("=")[0] not in absent]
    return replace(drawn, overrides=(*kept, f"backend.name={toml_value('neuron-native')}"))


@dataclass(frozen=True)
class Error:
    """Largest differences of a run from its reference, over all steps and ranks."""

    loss: float
    norm: float
    weight: float

    @property
    def is_parity(self) -> bool:
        """True within the tolerances; a difference that is not a number is beyond them."""
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


def ours_in_static_shapes(backend: Backend, drawn: Drawn, weights: dict[str, Tensor]) -> Course:
    """The course of a rank whose experts compute blocks of equal size, as in graphs."""
    with mock.patch.object(type(backend.kernels), "static_shapes", True):
        return ours(backend, drawn, weights)


def error_of(courses: Sequence[Course], want: Course, drawn: Drawn) -> Error:
    """Hold the courses of all ranks against the reference."""
    loss, norm, weight = 0.0, 0.0, 0.0
    for rank, course in enumerate(courses):
        mesh = build_mesh(drawn.resolved, len(courses), rank, len(courses))
        loss = max([loss, *(abs(a - b) for a, b in zip(course.losses, want.losses, strict=True))], key=_worse)
        norm = max([norm, *(norm_error(a, b) for a, b in zip(course.norms, want.norms, strict=True))], key=_worse)
        weight = max(weight, max_weight_error(course, want, drawn.resolved, mesh), key=_worse)
    return Error(loss, norm, weight)


def norm_error(norm: float, wanted: float) -> float:
    """Difference of a norm in parts of the reference's."""
    return abs(norm - wanted) / max(wanted, LEAST_NORM)


def _worse(x: float) -> float:
    return math.inf if math.isnan(x) else x


def failures(errors: Sequence[tuple[Drawn, Error]]) -> str:
    """A line for each run beyond the tolerances, with the command that repeats the run."""
    return "\n".join(f"{error}: {drawn.reproduce}" for drawn, error in errors if not error.is_parity)


def check_drawn(courses: Sequence[Course], want: Course, drawn: Drawn, about: str = "") -> None:
    """Refuse courses that are not those of the reference, with the command that repeats the run."""
    failed = failures([(drawn, error_of(courses, want, drawn))])
    assert not failed, (failed, about)


LIMIT_S = 180


def prepare(drawn: Drawn, folder: Path) -> list[str]:
    """Write the model and the data of a run, and return the command that trains it."""
    overrides = written(drawn, folder)
    return ["nxtrain", "launch", str(TINY.relative_to(ROOT)), *overrides, "--nproc", str(drawn.degrees.world)]


def written(drawn: Drawn, folder: Path) -> list[str]:
    """Write the model and the data of a run, and return the overrides that train it."""
    drawn = unmasked(drawn)
    hf_model(drawn.resolved, weights=first_weights(drawn)).save_pretrained(folder / "model")
    np.save(folder / "rows.npy", torch.cat(drawn.token_rows()).numpy().astype(np.uint16))
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
    if drawn.resolved.config.data.doc_mask:
        names = WordLevel({END_OF_TEXT: END_ID}, unk_token=END_OF_TEXT)
        Tokenizer(names).save(str(folder / "tokenizer.json"))
        own["data.tokenizer"] = folder / "tokenizer.json"
    return [*shape, *(f"{key}={value}" for key, value in own.items())]


def unmasked(drawn: Drawn) -> Drawn:
    """The same run on data whose targets all count, as token files have them."""
    return replace(drawn, mask=0.0)


def run_command(argv: list[str]) -> None:
    """Run a command of `prepare`."""
    program = [sys.executable, "-m", *argv]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(program, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, f"{shlex.join(argv)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def error_of_command(drawn: Drawn, folder: Path) -> Error:
    """Hold the records of a finished command against the reference."""
    lines = (folder / "run" / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["step"] for record in records] == list(range(1, drawn.steps + 1))
    actual = Course([record["loss"] for record in records], [record["grad_norm"] for record in records], {})
    want = wanted(unmasked(drawn))
    loss = max(abs(a - b) for a, b in zip(actual.losses, want.losses, strict=True))
    norm = max(norm_error(a, b) for a, b in zip(actual.norms, want.norms, strict=True))
    return Error(loss, norm, 0.0)


def across_a_checkpoint(backend: Backend, drawn: Drawn, overrides: Sequence[str]) -> None:
    """Train this rank's part of a run that stops after a drawn step and goes on from its checkpoint."""
    stop = Random(f"stop/{drawn}").randint(1, drawn.steps - 1)
    for last in (stop, drawn.steps):
        loaded = load(TINY, [*overrides, f"train.steps={last}"])
        train_on(RunContext.open(backend, resolve_config(loaded, drawn.degrees.world)))
