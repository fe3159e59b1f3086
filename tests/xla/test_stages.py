"""Stages that run programs of their own and meet in between, on several XLA devices with real collectives.

The reference is the same chain of blocks on whole tensors in one process.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from nxtrain.common.mesh import Mesh
from tests.support.xla_engine import run_devices
from tests.support.xla_stages import MICRO_BATCHES, expected, handed, seen_by, sent_by_the_first, stages, traced

STEPS = 3
LAYOUTS = {
    "pp2 x tp2": Mesh(4, 0, pp_size=2, tp_size=2),
    "pp2 x tp2, permuted": Mesh(4, 0, pp_size=2, tp_size=2, order=(1, 2, 3, 0)),
    "pp4": Mesh(4, 0, pp_size=4),
}
COLLECTIVES = re.compile(r" (all-gather|all-reduce|reduce-scatter|collective-permute)\(")


@pytest.mark.parametrize("name", LAYOUTS)
def test_stages_of_different_programs_train_as_one_process_does(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    played = run_devices(4, stages, layout, STEPS, folder=tmp_path)
    losses, norms = expected(layout.pp_size, STEPS)
    own: dict[int, set[str]] = {}
    for rank, found in enumerate(played):
        assert found.losses == pytest.approx(losses, rel=2e-6)
        assert found.norms == pytest.approx(norms, rel=2e-6)
        assert found.compiled == [found.compiled[0]] * STEPS, "the first step has compiled all"
        assert found.graphs == [found.graphs[0]] * STEPS
        stage = seen_by(layout, rank).pp.rank
        graphs = {graph.hash for graph in found.graphs[0][:-3] if not graph.text}  # the last: two sums, and the update
        assert own.setdefault(stage, graphs) == graphs, "ranks of a stage run the same"
        edges = 1 if stage in (0, layout.pp_size - 1) else 2
        assert sum(bool(graph.text) for graph in found.graphs[0]) == 2 * MICRO_BATCHES * edges + 2
    assert not set.intersection(*own.values()), "the stages differ, else this shows nothing"

    apart = {graph.hash: graph.text for found in played for graph in found.graphs[0] if graph.text}
    kinds = sorted(COLLECTIVES.findall(text) for text in apart.values())
    transfers = [["all-gather"]] * (1 if layout.pp_size == 2 else 2)
    assert [kind for kind in kinds if kind == ["all-gather"]] == transfers, "one program for all stages and both ways"
    assert len(kinds) == len(transfers) + 2, "and one for each kind of sum"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_transfer_is_one_graph_whatever_is_sent(dtype: torch.dtype, tmp_path: Path) -> None:
    layout = Mesh(2, 0, pp_size=2, order=(1, 0))
    second, first = run_devices(2, handed, layout, dtype, folder=tmp_path)
    given = sent_by_the_first(dtype)
    *received, swapped = second.received
    assert all(torch.equal(x, y) for x, y in zip(received, given, strict=True))
    assert torch.equal(swapped, given[2]) and torch.equal(first.received[0], torch.ones(4, 3, dtype=dtype))
    assert first.sums == second.sums == [9.0, 9.0]  # the first sum replaced its number
    assert first.graphs == second.graphs
    assert len(first.graphs) == len(given) + 3
    *transfers, total, bucket = first.graphs
    assert len(set(transfers)) == 1 and total == bucket not in transfers


def test_ranks_on_paper_record_the_same_transfer_and_sum_in_every_stage(tmp_path: Path) -> None:
    layout = Mesh(512, 0, pp_size=8, dp_size=8, tp_size=8)
    (found,) = run_devices(1, traced, layout, [0, 77, 191, 511], folder=tmp_path)
    assert [len(hashes) for hashes in found] == [4, 3, 4, 3], "a stage that receives has nothing to do before"
    assert len({hashes[-3] for hashes in found}) == len({hashes[-1] for hashes in found}) == 1
    assert len({hashes[-2] for hashes in found}) == 2
