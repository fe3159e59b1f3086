"""Several processes of PyTorch/XLA as under torchrun: one world or a clear refusal, and the same graphs or none.

XLA:CPU joins no processes. They pretend the world (see `tests.support.xla_ranks`), so that groups, hosts and graphs are
those of a cluster, and nothing can be executed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from nxtrain.common.errors import BackendError
from tests.support.models import changed
from tests.support.parity import layout
from tests.support.xla_rank_bodies import RANK_MUTANTS, on_a_fake_neuron_machine, outcomes
from tests.support.xla_ranks import command_ranks, run_ranks

CONFIG = Path(__file__).parents[2] / "configs/tiny_cpu.toml"
STEPS = 3
CASES = ["", "rank", *RANK_MUTANTS]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[str]]]:
    """By defect and rank: class and message of what ended the run, and the graphs that would have been run."""
    train = {"global_batch": 4, "micro_batch": 2, "eval_every": 2, "eval_batches": 1}
    plan = changed(layout("gqa2", tp=2, dp=1, sp=True), train=train, metrics={"log_every": 1})
    by_rank = run_ranks(2, outcomes, plan, STEPS, CASES, folder=tmp_path_factory.mktemp("ranks"))
    return {case: [found[index] for found in by_rank] for index, case in enumerate(CASES)}


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
    found = run_ranks(2, on_a_fake_neuron_machine, plan, folder=tmp_path)
    for rank, facts in enumerate(found):
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
