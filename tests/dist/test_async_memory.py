"""Asynchronous checkpoints of several ranks of which one lacks memory for its copy: all ranks write alike."""

from __future__ import annotations

import errno
import socket
import sys
from pathlib import Path
from unittest import mock

import pytest

from nxtrain.backends.base import Backend
from nxtrain.checkpoint import async_writer, directory, staging
from nxtrain.checkpoint.async_writer import CheckpointWriter, Destination, SaveOutcome
from nxtrain.checkpoint.directory import Retention
from nxtrain.common.distributed.agreement import Ranks, StorageScope
from nxtrain.common.io.checksummed_file import aligned_memory
from nxtrain.common.mesh import Mesh
from nxtrain.common.sharding import Layout
from tests.support.ranks import RankPool
from tests.support.run_folders import Shards, cut, meta, table

WORLD, STEPS = 4, (1, 2)

SHORT = "reports no free memory"
REFUSED = "refuses to give any"
"""Ways in which the memory of a rank's host is short."""


def write_checkpoints(
    backend: Backend, folder: Path, lacking: int | None, way: str, ranks_per_host: int
) -> tuple[list[SaveOutcome], list[bool]]:
    """Write two checkpoints with copies that one rank has no memory for, and then a third with memory everywhere."""
    mesh = Mesh.build(backend.world, backend.rank, tp=2)
    specs = table("gqa2", mesh)
    wanted = cut(specs, mesh)
    group = backend.background_group(60)
    scope = StorageScope(Ranks(mesh, group))
    writer = CheckpointWriter(Destination(folder, scope, Retention()), Layout(specs, mesh), Ranks(mesh))
    outcomes: list[SaveOutcome] = []
    has_copy: list[bool] = []

    def save(step: int) -> None:
        state: Shards = {kind: {name: x.clone() for name, x in tensors.items()} for kind, tensors in wanted.items()}
        writer.save(lambda: state, meta(step))
        for tensors in state.values():
            for tensor in tensors.values():
                tensor.fill_(9)  # training goes on
        has_copy.append(writer._staging.is_allocated)
        writer.settle()
        outcomes.extend(outcome for outcome in writer.poll() if isinstance(outcome, SaveOutcome))

    host = f"host{backend.rank // ranks_per_host}"
    is_lacking = backend.rank == lacking
    free = 0 if is_lacking and way == SHORT else sys.maxsize
    with mock.patch.object(socket, "gethostname", lambda: host):
        with mock.patch.object(async_writer, "free_memory_bytes", lambda: free):
            refusal = OSError(errno.ENOMEM, "Cannot allocate memory")
            refuses = is_lacking and way == REFUSED
            allocate = mock.Mock(side_effect=refusal) if refuses else aligned_memory
            with mock.patch.object(staging, "aligned_memory", allocate):
                for step in STEPS:
                    save(step)
        save(3)
    writer.close()
    return outcomes, has_copy


@pytest.mark.parametrize("way", [SHORT, REFUSED])
@pytest.mark.parametrize(("lacking", "ranks_per_host"), [(0, 2), (1, 2), (3, 1), (2, 4)])
def test_one_rank_without_memory_makes_all_ranks_write_while_training_waits(
    ranks: RankPool, tmp_path: Path, lacking: int, ranks_per_host: int, way: str
) -> None:
    ranks.run(WORLD, write_checkpoints, tmp_path / "copies", None, "", ranks_per_host)
    result = ranks.run(WORLD, write_checkpoints, tmp_path / "short", lacking, way, ranks_per_host)
    for outcomes, has_copy in result:
        assert [(outcome.step, outcome.problem) for outcome in outcomes] == [(1, ""), (2, ""), (3, "")]
        assert has_copy == [False, False, True]
        notes = [outcome.note for outcome in outcomes]
        assert f"host{lacking // ranks_per_host} " in notes[0]
        assert notes[1:] == ["", ""], "the line is printed once"
    assert len({outcomes[0].note for outcomes, _ in result}) == 1
    for step in (*STEPS, 3):
        copied, short = (directory.step_path(tmp_path / name, step) for name in ("copies", "short"))
        files = {path.name for path in copied.iterdir()}
        assert {path.name for path in short.iterdir()} == files
        for name in files:
            assert (short / name).read_bytes() == (copied / name).read_bytes(), name
