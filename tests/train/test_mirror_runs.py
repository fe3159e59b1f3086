"""Runs whose nodes keep checkpoints on disks of their own, and copies of them in a mirror.

Two ranks with folders of their own play two nodes; the reference is the same run that never stopped.
"""

from __future__ import annotations

import io
import os
import shutil
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from nxtrain.backends.base import Backend
from nxtrain.checkpoint import mirror
from nxtrain.checkpoint.convert.hf import nxtrain_to_hf
from nxtrain.common.distributed.agreement import Ranks
from nxtrain.common.mesh import Mesh
from nxtrain.common.run_folder import LOGS_DIR, STARTS_FILE
from nxtrain.config.check import Resolved
from nxtrain.metrics.start_log import last_step
from nxtrain.train.command import train_on
from nxtrain.train.context import RunContext
from nxtrain.train.start import start
from tests.support.object_stores import BUCKET, drop_bucket, s3, s3_variables
from tests.support.ranks import RankPool
from tests.support.runs import course, run_plan, token_file

__all__ = ["s3", "s3_variables"]

STEPS = 4
FILES = ("rank-00000.safetensors", "rank-00001.safetensors")


def node_rank(backend: Backend, plans: list[Resolved], variables: dict[str, str]) -> str:
    """The only rank of a node; returns what it told."""
    os.environ.update(variables)
    backend.local_rank, backend.local_world = 0, 1
    output = io.StringIO()
    with redirect_stderr(output):
        train_on(RunContext.open(backend, plans[backend.rank % len(plans)]))
    return output.getvalue()


class Nodes:
    def __init__(self, ranks: RankPool, folder: Path, mirror: str, variables: dict[str, str]) -> None:
        self.ranks, self.folder, self.mirror, self.variables = ranks, folder, mirror, variables
        self.data = {"source": "tokens", "path": str(token_file(folder / "rows.npy", num_rows=18))}

    def plan(self, name: str, steps: int, **checkpoint: Any) -> Resolved:
        return run_plan(
            self.folder / name,
            self.data,
            steps=steps,
            parallel={"tp": 1, "dp": 2},
            optim={"decay_steps": STEPS, "warmup_steps": 2},
            checkpoint={"every": 1, "keep": 5, "async": False, **checkpoint},
        )

    def run(self, steps: int, **checkpoint: Any) -> str:
        plans = [self.plan(f"node-{n}", steps, **{"mirror": self.mirror, **checkpoint}) for n in range(2)]
        return str(self.ranks.run(2, node_rank, plans, self.variables)[0])

    def straight(self) -> list[dict[str, Any]]:
        folder = self.folder / "straight"
        if not folder.exists():
            self.ranks.run(2, node_rank, [self.plan("straight", STEPS)], {})
        return course(folder)

    def checkpoint(self, node: int, step: int) -> Path:
        return self.folder / f"node-{node}" / "checkpoints" / f"step-{step:08d}"

    def lose(self, node: int) -> None:
        shutil.rmtree(self.folder / f"node-{node}")

    def course(self) -> list[dict[str, Any]]:
        return course(self.folder / "node-0")


@pytest.fixture(params=["folder", "s3"])
def nodes(request: pytest.FixtureRequest, ranks: RankPool, tmp_path: Path, s3_variables: dict[str, str]) -> Nodes:
    if request.param == "s3":
        request.getfixturevalue("s3")
        return Nodes(ranks, tmp_path, f"s3://{BUCKET}/run", s3_variables)
    return Nodes(ranks, tmp_path, str(tmp_path / "mirror"), {})


@pytest.fixture
def on_folder(ranks: RankPool, tmp_path: Path) -> Nodes:
    return Nodes(ranks, tmp_path, str(tmp_path / "mirror"), {})


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_run_that_loses_the_disk_of_a_node_goes_on_bit_for_bit(nodes: Nodes, lost: int) -> None:
    nodes.run(2)
    for node in range(2):
        assert [path.name for path in nodes.checkpoint(node, 2).glob("rank-*")] == [FILES[node]]
        assert (nodes.checkpoint(node, 2) / "verified").exists()
    nodes.lose(lost)
    assert "continues after step 2" in nodes.run(STEPS)
    assert nodes.course()[-2:] == nodes.straight()[-2:]
    assert len(nodes.course()) == (STEPS if lost else STEPS - 2)  # the record lies on the first node's disk


def test_a_checkpoint_that_never_reached_the_mirror_gets_there_first(nodes: Nodes, request: Any) -> None:
    """As after a kill between the commit and the copy."""
    nodes.run(2)
    if nodes.mirror.startswith("s3://"):
        client = request.getfixturevalue("s3")
        for name in (*FILES, "manifest.json", "meta.json"):
            client.delete_object(Bucket=BUCKET, Key=f"run/step-00000002/{name}")
    else:
        shutil.rmtree(Path(nodes.mirror) / "step-00000002")
    assert "continues after step 2" in nodes.run(STEPS)
    assert nodes.course() == nodes.straight()


def test_rank_files_without_meta_are_no_checkpoint(on_folder: Nodes) -> None:
    """As after a kill during the copy, and with it a lost disk."""
    on_folder.run(2)
    (Path(on_folder.mirror) / "step-00000002" / "meta.json").unlink()
    on_folder.lose(1)
    output = on_folder.run(STEPS)
    assert f"step 2 is not in {on_folder.mirror}, and no disk holds its {FILES[1]} whole" in output
    assert "continues after step 1" in output
    assert on_folder.course() == on_folder.straight()


def test_a_flipped_bit_in_the_mirror_is_named_and_the_one_before_it_taken(nodes: Nodes, request: Any) -> None:
    nodes.run(2)
    if nodes.mirror.startswith("s3://"):
        client, key = request.getfixturevalue("s3"), {"Bucket": BUCKET, "Key": f"run/step-00000002/{FILES[1]}"}
        content = bytearray(client.get_object(**key)["Body"].read())
        content[-1] ^= 1
        client.put_object(**key, Body=bytes(content))
    else:
        flip(Path(nodes.mirror) / "step-00000002" / FILES[1])
    nodes.lose(1)
    output = nodes.run(STEPS)
    assert f"{nodes.mirror}/step-00000002/{FILES[1]} is damaged: bytes" in output
    assert f"step 2 is put aside on disks and in {nodes.mirror}" in output
    assert "continues after step 1" in output
    assert nodes.course() == nodes.straight()
    assert nodes.checkpoint(0, 2).with_name("step-00000002.corrupt").is_dir()


def test_a_damaged_local_file_is_read_from_the_mirror_and_nothing_older(on_folder: Nodes) -> None:
    on_folder.run(2)
    flip(on_folder.checkpoint(1, 2) / FILES[1])
    output = on_folder.run(STEPS)
    assert f"WARNING: {on_folder.checkpoint(1, 2) / FILES[1]} is damaged" in output
    assert "continues after step 2" in output
    assert on_folder.course() == on_folder.straight()


@pytest.mark.parametrize("name", ["meta.json", "manifest.json"])
def test_a_damaged_list_on_one_disk_costs_no_step(on_folder: Nodes, name: str) -> None:
    on_folder.run(2)
    flip(on_folder.checkpoint(0, 2) / name)
    output = on_folder.run(STEPS)
    assert f"{on_folder.checkpoint(0, 2) / name} is damaged" in output
    assert "continues after step 2" in output
    assert on_folder.course() == on_folder.straight()


def test_a_disk_that_was_away_while_the_run_went_back_loses_what_was_left(on_folder: Nodes) -> None:
    on_folder.run(3)
    away = on_folder.folder / "node-1"
    away.rename(on_folder.folder / "away")
    on_folder.run(2, resume=f"{on_folder.mirror}/step-00000001")
    away.rename(on_folder.folder / "between")
    (on_folder.folder / "away").rename(away)
    output = on_folder.run(STEPS)
    assert "the run went back where this was not seen: put aside as abandoned" in output
    assert "continues after step 2" in output
    assert on_folder.course() == on_folder.straight()
    aside = [path.name for path in on_folder.checkpoint(1, 1).parent.glob("*.abandoned")]
    assert sorted(aside) == ["step-00000002.abandoned", "step-00000003.abandoned"]


def test_a_mirror_is_a_path_to_go_on_from_and_to_export(nodes: Nodes, tmp_path: Path) -> None:
    nodes.run(2)
    nodes.lose(0)
    nodes.lose(1)
    assert "continues after step 1" in nodes.run(
        STEPS, resume=f"{nodes.mirror}/step-00000001", mirror=f"{nodes.mirror}-2"
    )
    assert nodes.course() == nodes.straight()[1:]
    exported = nxtrain_to_hf(nodes.mirror, tmp_path / "hf")
    assert str(exported) == f"{nodes.mirror}/step-00000002"
    assert (tmp_path / "hf" / "model.safetensors").is_file()


def test_nodes_that_share_their_folder_go_on_from_it_and_one_of_them_acts(ranks: RankPool, tmp_path: Path) -> None:
    nodes = Nodes(ranks, tmp_path, str(tmp_path / "mirror"), {})
    ranks.run(2, node_rank, [nodes.plan("shared", 2, mirror=nodes.mirror)], {})
    held = sorted(path.name for path in (tmp_path / "shared" / "checkpoints" / "step-00000002").glob("rank-*"))
    assert held == list(FILES)
    shutil.rmtree(nodes.mirror)
    output = ranks.run(2, node_rank, [nodes.plan("shared", STEPS, mirror=nodes.mirror)], {})[0]
    assert "continues after step 2" in output
    assert course(tmp_path / "shared") == nodes.straight()


def find_disk(backend: Backend, folders: list[Path]) -> tuple[int, int]:
    """As on a node whose list of a folder is as old as its own file there."""
    listed = Path.glob

    def stale(self: Path, pattern: str) -> Any:
        return (path for path in listed(self, pattern) if path.name.endswith(f"-{backend.rank}"))

    with patch.object(Path, "glob", stale), patch.object(Path, "iterdir", lambda self: stale(self, "*")):
        mesh = Mesh.build(2, backend.rank, tp=1, dp=2)
        scope = mirror._find_scope(folders[backend.rank % len(folders)], Ranks(mesh), 0)
        return scope.leader, scope.number


def test_nodes_find_out_by_name_that_they_share_a_folder(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, find_disk, [tmp_path / "shared"]) == [(0, 1), (0, 1)]
    assert ranks.run(2, find_disk, [tmp_path / "a", tmp_path / "b"]) == [(0, 2), (1, 2)]
    assert not [*tmp_path.glob("*/.disk-*")]


def test_a_mirror_that_fails_is_told_and_the_run_ends_as_it_would(
    ranks: RankPool, tmp_path: Path, s3: Any, s3_variables: dict[str, str]
) -> None:
    nodes = Nodes(ranks, tmp_path, f"s3://{BUCKET}/run", s3_variables)
    plans = [nodes.plan(f"node-{n}", STEPS, mirror=nodes.mirror, strict=True) for n in range(2)]
    output = nodes.ranks.run(2, doomed_rank, plans, s3_variables)[0]
    assert "WARNING: the mirror lacks the checkpoint of step 1" in output
    assert "NoSuchBucket" in output
    assert nodes.course() == nodes.straight()


def doomed_rank(backend: Backend, plans: list[Resolved], variables: dict[str, str]) -> str:
    """As `node_rank`, with a bucket that is deleted once the run has looked at it."""
    import boto3

    from nxtrain.train import assembly

    os.environ.update(variables)

    def start_and_drop(*args: Any, **kwargs: Any) -> Any:
        begun = start(*args, **kwargs)
        if backend.rank == 0:
            drop_bucket(boto3.client("s3"))
        backend.collectives.barrier()
        return begun

    with patch.object(assembly, "start", start_and_drop):
        return node_rank(backend, plans, variables)


def test_each_node_knows_how_far_the_run_is(ranks: RankPool, tmp_path: Path) -> None:
    """Its launcher counts restarts anew when the run gets further, and sees no other disk."""
    nodes = Nodes(ranks, tmp_path, str(tmp_path / "mirror"), {})
    nodes.run(2)
    assert [last_step(tmp_path / f"node-{node}" / LOGS_DIR) for node in range(2)] == [2, 2]
    assert not (tmp_path / "node-1" / LOGS_DIR / STARTS_FILE).exists()
