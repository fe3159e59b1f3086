"""Several processes of PyTorch/XLA as under torchrun: one world or a clear refusal, and the same graphs or none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nxtrain.backends.base import BackendSettings
from nxtrain.backends.neuron.backend import NeuronBackend
from nxtrain.backends.xla import backend
from nxtrain.backends.xla.world import join
from nxtrain.checkpoint import directory
from nxtrain.common.errors import BackendError, NxtrainError
from nxtrain.common.process.placement import Placement
from nxtrain.common.run_folder import CHECKPOINTS_DIR
from nxtrain.config.check import Resolved
from nxtrain.config.schema import RunConfig
from nxtrain.metrics.run_observer import Observers, RunObserver
from nxtrain.optim.schedule import Schedule
from nxtrain.parallel.grads import Gradients
from nxtrain.tools.trace import trace
from nxtrain.train.build import build_mesh, build_model, build_state
from nxtrain.train.checkpoints import Checkpoints, RunIdentity
from nxtrain.train.compatibility import RunInputs, meta_at
from nxtrain.train.graph_extraction import trainer
from nxtrain.train.health.numerics import NumericsGuard
from nxtrain.train.health.recompiles import Recompiles
from nxtrain.train.start import restore
from nxtrain.train.step import TrainState
from nxtrain.train.trainer import Trainer
from tests.support.graph_mutants import MUTANTS
from tests.support.models import changed
from tests.support.neuron_machine import furnish, stand_on
from tests.support.parity import layout
from tests.support.xla_engine import command_ranks, run_ranks


def outcomes(placement: Placement, plan: Resolved, steps: int, mutants: Sequence[str]) -> list[list[str]]:
    """Train on paper with each defect: class and message of what ended it, and the graphs that were handed over."""
    results = []
    with (
        patch.object(backend, "join", cache(join)),  # one process group for all cases
        patch.object(trace, "trainer", _as_in_a_run),
    ):
        for mutant in mutants:
            tape = trace._Recorder(rank=placement.rank)
            with {**MUTANTS, **RANK_MUTANTS}[mutant]():
                try:
                    trace._play(plan, placement.world, tape, steps)
                    ended = ["", ""]
                except NxtrainError as error:
                    ended = [type(error).__name__, str(error)]
            results.append([*ended, *(cut.hash for cut in tape.cuts)])
    return results


def _as_in_a_run(
    plan: Resolved, state: TrainState, config: RunConfig, schedule: Schedule, observer: RunObserver
) -> Trainer:
    """The trainer on paper, watched as the one of a run is."""
    recompiles = Recompiles(state.backend, config.compile.max_recompiles)
    return trainer(plan, state, config, schedule, Observers(observer, recompiles))


def _uneven_batch() -> AbstractContextManager[Any]:
    sound = Trainer._put

    def put(self: Trainer, batch: Any) -> Any:
        whole = sound(self, batch)
        short = slice(1 if self.state.mesh.rank else None)
        return type(whole)([x[short] for x in whole.inputs], [x[short] for x in whole.targets])

    return patch.object(Trainer, "_put", put)


def _work_of_one_rank() -> AbstractContextManager[Any]:
    sound = NumericsGuard.values

    def values(self: NumericsGuard) -> dict[str, Tensor]:  # the first of what is computed for a record
        if self._state.mesh.rank == 1:
            self._state.backend.step_boundary()
        return sound(self)

    return patch.object(NumericsGuard, "values", values)


def _after_warm_up() -> AbstractContextManager[Any]:
    sound, calls = Gradients.norm, []

    def norm(self: Gradients, tensors: Mapping[str, Tensor]) -> Tensor:
        calls.append(0)
        late = self._layout.mesh.rank and len(calls) > 4  # each step asks twice: for the update and for the log
        return sound(self, tensors) + (2.0 if late else 0.0)

    return patch.object(Gradients, "norm", norm)


RANK_MUTANTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "uneven batch": _uneven_batch,
    "work of one rank": _work_of_one_rank,
    "after warm-up": _after_warm_up,
}


def on_a_fake_neuron_machine(placement: Placement, plan: Resolved) -> dict[str, Any]:
    """Open and close the Neuron backend on a pretended machine, and use what it gives beside graphs."""
    import torch_xla
    from torch_xla.distributed.xla_backend import ProcessGroupXla

    machine = plan.config.run.dir.parent / f"machine-{placement.rank}"
    furnish(machine)
    stand_on(machine)
    backend = NeuronBackend(BackendSettings(hang_timeout_s=60.0))
    result: dict[str, Any] = {
        "placement": [backend.rank, backend.world, backend.local_rank, backend.local_world],
        "default group": [dist.get_backend(), dist.get_rank(), dist.get_world_size()],
        "is of torch-xla": isinstance(dist.group.WORLD, ProcessGroupXla),
        "devices that replicate": torch_xla._XLAC._xla_get_replication_devices_count(),
        "host group": dist.get_backend(backend.host_group),
        "hosts wait": _timeout_s(backend),
    }
    groups = [[0], [1]]
    made = dist.new_group([placement.rank], pg_options={"xla_pg_options": {"mesh": groups}})
    result["group of NxD"] = getattr(made, "_mesh", None)
    backend.collectives.barrier()
    result["compiled"] = backend.diagnostics.num_compiled()
    result["resumes"] = _saved_and_loaded(backend, plan)
    backend.close()
    result["closed"] = not dist.is_initialized()
    return result


def _timeout_s(backend: NeuronBackend) -> float:
    assert backend.host_group is not None
    return float(backend.host_group._get_backend(torch.device("cpu")).options._timeout.total_seconds())


def _saved_and_loaded(backend: NeuronBackend, plan: Resolved) -> bool:
    """True if this rank finds its drawn weights in a checkpoint that both saved, as a run saves and resumes."""
    mesh = build_mesh(plan, backend.world, backend.rank, backend.local_world)

    def state(init: Literal["draw", "zeros"]) -> TrainState:
        return build_state(plan, build_model(plan, backend, mesh, init=init), backend, mesh)

    saved, loaded = state("draw"), state("zeros")
    backend.step_boundary()
    inputs = RunInputs("")
    Checkpoints(plan, saved, RunIdentity(inputs, meta_at(0, plan, inputs)), print).save(1, True)
    restore(loaded, directory.step_path(plan.config.run.dir / CHECKPOINTS_DIR, 1), weights_only=False)
    backend.step_boundary()
    there = dict(loaded.model.named_parameters())
    return all(torch.equal(x.cpu(), there[name].cpu()) and x.any() for name, x in saved.model.named_parameters())


CONFIG = Path(__file__).parents[2] / "configs/tiny_cpu.toml"
STEPS = 3
CASES = ["", "rank", *RANK_MUTANTS]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[str]]]:
    """By defect and rank: class and message of what ended the run, and the graphs that would have been run."""
    train = {"global_batch": 4, "micro_batch": 2, "eval_every": 2, "eval_batches": 1}
    plan = changed(layout("gqa2", tp=2, dp=1, sp=True), train=train, metrics={"log_every": 1})
    by_rank = run_ranks(2, outcomes, plan, STEPS, CASES, folder=tmp_path_factory.mktemp("ranks"))
    return {case: [result[index] for result in by_rank] for index, case in enumerate(CASES)}


def test_ranks_that_record_the_same_graphs_run_to_the_end(ended: dict[str, list[list[str]]]) -> None:
    one, other = ended[""]
    assert one == other
    kind, message, *graphs = one
    assert (kind, message) == ("", "")
    assert len(graphs) == (STEPS + 1) * 4, "two micro-batches, an update and a log in each step; two evaluations of two"


@pytest.mark.parametrize(
    ("case", "where", "handed_over"),
    [
        ("rank", "step 1 (training), graph 3", 2),  # the norm, and so the update, which follows two micro-batches
        ("uneven batch", "step 1 (training), graph 1", 0),
    ],
)
def test_ranks_that_differ_end_before_they_run(
    case: str, where: str, handed_over: int, ended: dict[str, list[list[str]]]
) -> None:
    (kind, message, *graphs), (other_kind, other_message, *other_graphs) = ended[case]
    assert kind == other_kind == "BackendError"
    assert len(graphs) == len(other_graphs) == handed_over
    first, mine, theirs, *_ = message.splitlines()
    assert first.startswith("rank 1 of 2 would run another graph than rank 0")
    assert mine.startswith(f"    rank 0: {where}, ")
    assert theirs.startswith(f"    rank 1: {where}, ")
    assert mine[-12:] != theirs[-12:]
    assert other_message == f"ranks are about to run different graphs in {where}; see rank 0"


def test_a_rank_that_hands_over_nothing_is_told_from_one_that_does(ended: dict[str, list[list[str]]]) -> None:
    message = ended["work of one rank"][0][1]
    assert "    rank 1: step 1 (log), graph 1, no graph" in message.splitlines()


def test_steady_steps_are_not_compared(ended: dict[str, list[list[str]]]) -> None:
    one, other = ended["after warm-up"]
    assert one[:2] == other[:2] == ["", ""]
    assert one[2:] != other[2:]


def test_the_neuron_backend_joins_the_ranks_and_leaves_them(tmp_path: Path) -> None:
    plan = changed(layout("gqa2", tp=2, dp=1, sp=True), run={"dir": tmp_path / "run"})
    result = run_ranks(2, on_a_fake_neuron_machine, plan, folder=tmp_path)
    for rank, facts in enumerate(result):
        assert facts == {
            "placement": [rank, 2, rank, 2],
            "default group": ["xla", rank, 2],
            "is of torch-xla": True,
            "devices that replicate": 1,  # of this process, the only ones that XLA:CPU sees; 0 is a world of one
            "host group": "gloo",
            "hosts wait": 240.0,  # 4 x the 60 s of the run, since another rank may compile
            "group of NxD": [[0], [1]],
            "compiled": 0,  # by what is above: a barrier on the hosts needs no graph
            "resumes": True,
            "closed": True,
        }


def test_processes_that_the_devices_do_not_join_are_refused(tmp_path: Path) -> None:
    overrides = ["backend.name=xla", f"run.dir={tmp_path / 'run'}", "train.micro_batch=8"]
    for rank, done in enumerate(command_ranks(2, "train", CONFIG, *overrides, folder=tmp_path)):
        assert done.code == BackendError.exit_code, done.printed
        assert f"torchrun started rank {rank} of 2, but PyTorch/XLA on CPU is rank 0 of 1" in done.printed
        assert "Use backend.name=cpu for several ranks" in done.printed
        assert "Traceback" not in done.printed
    assert not (tmp_path / "run").exists()
