"""Runs that are interrupted at drawn points, and go on from the memories of some ranks, are the undisturbed runs.

Each rank is interrupted at a point of its own, and some lose their memory, as a replacement has none. The process
groups stay: `tests/faults/test_in_job.py` kills processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch

from nxtrain.backends.base import Backend
from nxtrain.backends.cpu_native.shared_memory import SharedMemoryCollectives
from nxtrain.checkpoint import directory
from nxtrain.common.errors import NxtrainError
from nxtrain.common.run_folder import CHECKPOINTS_DIR
from nxtrain.config.check import Resolved
from nxtrain.optim.adamw import AdamW
from nxtrain.train import rank_memory, step, trainer
from nxtrain.train.assembly import assemble
from nxtrain.train.build import build_mesh
from nxtrain.train.context import RunContext
from nxtrain.train.rank_memory import AgreedStep, HeldStep, RankMemory, agree
from nxtrain.train.step import TrainState
from nxtrain.train.trainer import Trainer
from tests.support.drawn import SEED
from tests.support.ranks import RankPool
from tests.support.recovery import tensors
from tests.support.runs import course, run_plan, token_file

STEPS, EVERY = 7, 3
"""Steps of a run, and those between records and checkpoints."""

POINTS = ("norm", "update", "updated", "concluding", "concluded")
"""Points of a step after its last collective, in their order; a rank may be interrupted at any of them."""

LAYOUTS: dict[str, Mapping[str, Mapping[str, Any]]] = {
    "dp2": {"parallel": {"dp": 2}},
    "dp3": {"parallel": {"dp": 3}, "train": {"global_batch": 6}},
    "tp2-dp2": {"parallel": {"dp": 2, "tp": 2}},
    "pp2-dp2": {"parallel": {"dp": 2, "pp": 2}},
    "cp2-dp2": {"parallel": {"dp": 2, "cp": 2}},
    "hybrid": {"parallel": {"dp": 4, "shard": "hybrid", "shard_size": 2}},
    "zero1": {"parallel": {"dp": 2, "shard": "zero1"}},
    "fp16": {"parallel": {"dp": 2}, "precision": {"params": "fp16", "update": "fp32_master"}},
    "kahan-noise-ema": {
        "parallel": {"dp": 2},
        "precision": {"params": "bf16", "update": "bf16_kahan"},
        "metrics": {"noise_scale": True},
        "optim": {"ema_decay": 0.9},
    },
}
"""Tables of the configuration by layout."""


OWNERS: dict[str, tuple[Any, str]] = {
    "begin": (trainer, "update"),
    "norm": (step, "not_finite"),
    "update": (AdamW, "step"),
    "updated": (Trainer, "_conclude"),
    "concluding": (Trainer, "_finish"),
    "concluded": (RankMemory, "finish"),
}
"""Function at each point. Of `update` and `concluded`, the interruption comes after the function."""

DRAWS = 3
"""Interruptions of each layout."""


class InterruptedStepError(NxtrainError):
    """Interruption of a step, in place of the loss of a peer."""


@dataclass(frozen=True)
class Interruption:
    """Interruption of a run.

    Args:
        step: Step of the interruption.
        points: Point of each rank; `begin`: before the step.
        lost: Ranks without memory.
    """

    step: int
    points: tuple[str, ...]
    lost: frozenset[int]

    @property
    def standings(self) -> list[HeldStep | None]:
        """Expected standing of each rank."""
        known: dict[str, HeldStep | None] = {
            "begin": HeldStep(self.step - 1, is_finished=True),
            "norm": HeldStep(self.step - 1, is_finished=True),
            "update": None,
            "updated": HeldStep(self.step, is_finished=False),
            "concluding": HeldStep(self.step, is_finished=False),
            "concluded": HeldStep(self.step, is_finished=True),
        }
        return [None if rank in self.lost else known[point] for rank, point in enumerate(self.points)]


def draw(layout: str, index: int, world: int) -> Interruption:
    """Draw an interruption. Ranks differ in their points only where no collective follows the update."""
    rng = Random(f"memory/{SEED}/{layout}/{index}")
    at = rng.randint(1, STEPS)
    lost = frozenset(rng.sample(range(world), rng.randint(1, world - 1)))
    if index % 3 == 0:
        return Interruption(at, ("begin",) * world, lost)
    if index % 3 == 1 or layout in {"zero1", "hybrid"}:
        return Interruption(at, (rng.choice(POINTS),) * world, lost)
    silent = [number for number in range(2, STEPS) if number % EVERY]
    points = POINTS[1:] if "noise" in layout else POINTS  # the noise scale has a collective after the norm
    return Interruption(rng.choice(silent), tuple(rng.choices(points, k=world)), lost)


def interrupting(point: str, at: int) -> AbstractContextManager[Any]:
    """Interrupt this rank at a point of a step, counted in calls of the function at the point."""
    owner, name = OWNERS[point]
    function, calls = getattr(owner, name), count(0 if name.endswith("finish") else 1)  # which begins a run

    def interrupt(*args: Any, **kwargs: Any) -> Any:
        is_due = next(calls) == at
        if is_due and point in {"update", "concluded"}:
            function(*args, **kwargs)
        if is_due:
            raise InterruptedStepError("injected")
        return function(*args, **kwargs)

    return mock.patch.object(owner, name, interrupt)


def interrupted(backend: Backend, resolved: Resolved, how: Interruption, mutant: str = "") -> tuple[Any, ...]:
    """Train with an interruption; return this rank's standing, and the step from which it went on in memory."""
    memory = RankMemory(is_kept=True)
    with MUTANTS[mutant]():
        with pytest.raises(InterruptedStepError), interrupting(how.points[backend.rank], how.step):
            assemble(RunContext.open(backend, resolved), memory).train()
        memory.detach()
        if backend.rank in how.lost:
            memory = RankMemory(is_kept=True)
        standing = memory.standing
        run = assemble(RunContext.open(backend, resolved), memory)
        resumed = None if memory.resumed is None else memory.resumed.meta.step
        run.train()
    return standing, resumed


def undisturbed(backend: Backend, resolved: Resolved) -> None:
    assemble(RunContext.open(backend, resolved), RankMemory()).train()


_SEND = SharedMemoryCollectives.start_send

MUTANTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "": nullcontext,
    "the history of norms and the number of updates are lost": lambda: mock.patch.object(TrainState, "counters", {}),
    "an update counts as whole though it is under way": lambda: mock.patch.object(
        TrainState, "reporting", lambda state, section: state
    ),
    "a record that is missing counts as made": lambda: mock.patch.object(
        rank_memory, "agree", lambda *args: _concluded(agree(*args))
    ),
    "a replacement receives another state": lambda: mock.patch.object(
        SharedMemoryCollectives, "start_send", lambda comm, x, axis, to: _SEND(comm, torch.zeros_like(x), axis, to)
    ),
}
"""Defects by what they do."""


def _concluded(found: AgreedStep | None) -> AgreedStep | None:
    return None if found is None else replace(found, is_finished=True)


def plan(folder: Path, layout: str) -> Resolved:
    data = {"source": "tokens", "path": str(token_file(folder.parent / "rows.npy", 64))}
    tables = {name: dict(table) for name, table in LAYOUTS[layout].items()}
    tables["metrics"] = {"log_every": EVERY, **tables.get("metrics", {})}
    return run_plan(folder, data, steps=STEPS, checkpoint={"every": EVERY, "async": False}, **tables)


def outcome(folder: Path) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """Records, and the tensors of the last checkpoint. A checkpoint does not hold the means of the noise scale."""
    records = [{key: value for key, value in record.items() if key != "noise_scale"} for record in course(folder)]
    return records, tensors(directory.step_path(folder / CHECKPOINTS_DIR, STEPS))


def expected(resolved: Resolved, how: Interruption) -> int | None:
    """Newest step of which each part of the model is in the memory of a rank; None: there is none."""
    world = len(how.points)
    steps: dict[tuple[int, int, int], set[int]] = {}
    for rank, standing in enumerate(how.standings):
        mesh = build_mesh(resolved, world, rank, world)
        part = steps.setdefault((mesh.pp.rank, mesh.tp.rank, mesh.shard.rank), set())
        if standing is not None:
            part.add(standing.step)
    return max(set.intersection(*steps.values()), default=None)


FEW = ("dp2", "tp2-dp2", "kahan-noise-ema")
"""Layouts without `--slow`."""


@pytest.mark.parametrize(
    "layout", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_a_run_goes_on_from_memory_wherever_it_was_interrupted(ranks: RankPool, tmp_path: Path, layout: str) -> None:
    whole = plan(tmp_path / "whole", layout)
    world = whole.config.parallel.ranks_per_replica * whole.config.parallel.dp
    ranks.run(world, undisturbed, whole)
    for index in range(DRAWS):
        folder = tmp_path / f"{index}"
        resolved, how = plan(folder, layout), draw(layout, index, world)
        found = ranks.run(world, interrupted, resolved, how)
        assert [standing for standing, _ in found] == how.standings, how
        assert {step for _, step in found} == {expected(resolved, how)}, how
        assert outcome(folder) == outcome(tmp_path / "whole"), how


CAUGHT = {
    "the history of norms and the number of updates are lost": Interruption(5, ("begin", "begin"), frozenset({1})),
    "an update counts as whole though it is under way": Interruption(5, ("update", "norm"), frozenset({1})),
    "a record that is missing counts as made": Interruption(3, ("updated", "updated"), frozenset({0})),
    "a replacement receives another state": Interruption(5, ("begin", "begin"), frozenset({1})),
}
"""An interruption that shows each defect."""


@pytest.mark.parametrize("mutant", CAUGHT)
def test_a_defect_changes_the_run(ranks: RankPool, tmp_path: Path, mutant: str) -> None:
    ranks.run(2, undisturbed, plan(tmp_path / "whole", "dp2"))
    resolved = plan(tmp_path / "broken", "dp2")
    ranks.run(2, interrupted, resolved, CAUGHT[mutant], mutant)
    assert outcome(tmp_path / "broken") != outcome(tmp_path / "whole")
