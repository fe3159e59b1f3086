"""Compilations that count as recompilations, and their messages."""

from __future__ import annotations

from collections.abc import Iterable
from io import StringIO
from typing import cast

import pytest
from rich.console import Console

from nxtrain.backends.base import Backend
from nxtrain.common.errors import BackendError
from nxtrain.metrics.run_observer import Work
from nxtrain.train.health.recompiles import Recompiles

TRAINING: Work = "training"
LOG: Work = "log"
EVALUATION: Work = "evaluation"
CHECKPOINT: Work = "checkpoint"


class CompilingBackend:
    """A device that compiles when it is told."""

    rank, world = 3, 8

    def __init__(self) -> None:
        self.compiled = 5
        self.compared = [""]
        self.diagnostics = self

    def num_compiled(self) -> int:
        return self.compiled

    def compare_graphs(self, work: str) -> None:
        self.compared.append(work)


def play(backend: CompilingBackend, work: Iterable[tuple[Work, int, int]], limit: int) -> str:
    """Do work, each of a kind, in a step and with a number of new graphs; what was printed."""
    out = StringIO()
    recompiles = Recompiles(cast(Backend, backend), limit, Console(file=out, soft_wrap=True))
    for kind, step, new in work:
        recompiles.enter(step, kind)
        backend.compiled += new
    recompiles.settle()
    return out.getvalue()


@pytest.fixture
def backend() -> CompilingBackend:
    return CompilingBackend()


def test_each_kind_may_compile_twice(backend: CompilingBackend) -> None:
    kinds = (TRAINING, LOG, EVALUATION, CHECKPOINT)
    work = [(kind, step, 2 if step < 3 else 0) for step in (1, 2, 3, 4) for kind in kinds]
    assert play(backend, work, limit=0) == ""


def test_what_comes_late_for_the_first_time_may_compile(backend: CompilingBackend) -> None:
    work = [*((TRAINING, step, 0) for step in range(1, 100)), (EVALUATION, 99, 1), (CHECKPOINT, 99, 3)]
    assert play(backend, work, limit=0) == ""


def test_a_recompilation_is_told_with_rank_step_kind_and_causes(backend: CompilingBackend) -> None:
    work = [(kind, step, int((kind, step) == (LOG, 7))) for step in range(1, 10) for kind in (TRAINING, LOG)]
    printed = play(backend, work, limit=3)
    assert printed.startswith(
        "rank 3: step 7 (log) compiled a new graph, though log had been done 6 times; recompilation 1, "
        "compile.max_recompiles=3 are allowed. Usual causes: a tensor of another shape, a Python number that changed"
    )
    assert len(printed.splitlines()) == 1


def test_the_one_after_the_limit_ends_the_run_and_names_all(backend: CompilingBackend) -> None:
    work = [(TRAINING, step, 2 if step in {4, 6, 9} else 0) for step in range(1, 20)]
    with pytest.raises(BackendError) as raised:
        play(backend, work, 2)
    assert raised.value.exit_code == 5
    message = str(raised.value)
    assert message.startswith("step 9 (training) compiled 2 new graphs, recompilation 3 of this process; ")
    assert "compile.max_recompiles=2 allows no more" in message
    assert "Recompiled: step 4 (training), step 6 (training), step 9 (training)." in message
    assert "nxtrain graphs CONFIG --world 8 --steps 9 " in message
    assert backend.compared.count("step 2 (training)") == 1


def test_with_a_limit_of_0_the_first_ends_the_run(backend: CompilingBackend) -> None:
    with pytest.raises(BackendError, match=r"step 3 \(training\) compiled a new graph, recompilation 1 "):
        play(backend, [(TRAINING, step, 1) for step in (1, 2, 3)], limit=0)


def test_ranks_compare_their_graphs_only_while_the_work_is_new(backend: CompilingBackend) -> None:
    play(backend, [(TRAINING, 1, 1), (LOG, 1, 1), *((TRAINING, step, 0) for step in (2, 3, 4)), (LOG, 4, 0)], 0)
    asked = [work for work in backend.compared if work]
    assert asked == ["step 1 (training)", "step 1 (log)", "step 2 (training)", "step 4 (log)"]
    assert backend.compared[-1] == "", "what follows the loop is not compared"
    after_warm_up = backend.compared.index("step 2 (training)") + 1
    assert backend.compared[after_warm_up] == "", "nor is a third step"
