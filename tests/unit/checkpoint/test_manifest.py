"""Plans that all ranks share are sent once, in few bytes, and read only by ranks that need them."""

from __future__ import annotations

import itertools
import json
import math
import pickle
import random
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import SavePlan

from nxtrain.checkpoint.dcp_planner import ChunkSavePlanner
from nxtrain.checkpoint.dcp_storage import FileWriter, SharedPlan, Staged
from nxtrain.checkpoint.manifest import Box, CheckpointManifest, TensorEntry, read_manifest
from nxtrain.checkpoint.shards import TensorShard
from nxtrain.common.errors import CheckpointError, DamagedError
from nxtrain.common.io.checksummed_file import FileDigest
from nxtrain.common.sharding import Segment, ShardBox

RANKS, ROWS, NAMES = 64, 7, [f"layers.{number}.mlp.down_proj.weight" for number in range(12)]


def chunk(name: str, rank: int) -> TensorShard:
    """The rows of one rank, of a tensor that is cut over all of them."""
    shape, box = (RANKS * ROWS, 96), ((rank * ROWS, 0), (ROWS, 96))
    return TensorShard("exp_avg", name, name, shape, torch.float32, ShardBox(Segment("", shape[0]), *box, (0, 0), 0, 1))


def told(folder: Path, rank: int, joint: SharedPlan) -> tuple[FileWriter, SavePlan]:
    """Writer of a rank, and its plan for the coordinator."""
    tensors = {chunk(name, rank): torch.zeros(ROWS, 96) for name in NAMES}
    writer = FileWriter(folder, rank, Staged(tensors, joint=joint))
    planner = ChunkSavePlanner(tuple(tensors), tensors.__getitem__)
    return writer, writer.prepare_local_plan(planner.create_local_plan())


def test_a_part_costs_few_bytes_and_none_from_the_second_time_on(tmp_path: Path) -> None:
    joints = [SharedPlan() for _ in range(RANKS)]
    plans = [told(tmp_path, rank, joint) for rank, joint in enumerate(joints)]
    coordinator = plans[0][0]
    assert len(pickle.dumps(plans[5][1])) < 110 * len(NAMES)
    coordinator.prepare_global_plan([plan for _, plan in plans])
    coordinator.finish(None, [])  # type: ignore[arg-type]
    manifest = coordinator.manifest
    assert manifest is not None
    assert len(manifest.model_dump_json()) < 14 * RANKS * len(NAMES)
    for joint in joints:
        joint.is_planned = True
    plans = [told(tmp_path, rank, joint) for rank, joint in enumerate(joints)]
    assert all(len(pickle.dumps(plan)) < 200 for _, plan in plans)
    coordinator = plans[0][0]
    coordinator.prepare_global_plan([plan for _, plan in plans])
    coordinator.finish(None, [])  # type: ignore[arg-type]
    assert coordinator.manifest == manifest


def test_ranks_that_do_not_add_up_are_noticed(tmp_path: Path) -> None:
    plans = [told(tmp_path, rank, SharedPlan()) for rank in range(RANKS)]
    with pytest.raises(CheckpointError, match="ranks hold 42,336 of its 43,008 entries"):
        plans[0][0].prepare_global_plan([plan for _, plan in plans[:-1]])


def test_a_reader_learns_of_the_parts_that_it_needs_only(tmp_path: Path) -> None:
    plans = [told(tmp_path, rank, SharedPlan()) for rank in range(RANKS)]
    coordinator = plans[0][0]
    coordinator.prepare_global_plan([plan for _, plan in plans])
    coordinator.finish(None, [])  # type: ignore[arg-type]
    assert coordinator.manifest is not None
    key = f"exp_avg/{NAMES[3]}"
    found = CheckpointManifest.model_validate_json(coordinator.manifest.model_dump_json()).metadata(
        {key: [((3 * ROWS - 1, 0), (ROWS + 2, 1))]}
    )
    boxes = {name: len(tensor.chunks) for name, tensor in found.state_dict_metadata.items()}  # type: ignore[union-attr]
    assert boxes == {f"exp_avg/{name}": 3 if name == NAMES[3] else 0 for name in NAMES}
    assert [file for file, _ in found.storage_data.values()] == [f"rank-{rank:05d}.safetensors" for rank in (2, 3, 4)]


@pytest.mark.parametrize("num_dims", [0, 1, 2, 3])
def test_parts_that_overlap_are_those_that_share_an_entry(num_dims: int) -> None:
    """Against the sets of entries themselves, on grids of odd cuts."""
    draw = random.Random(num_dims)

    def entries(box: Box) -> set[tuple[int, ...]]:
        return set(itertools.product(*(range(first, first + size) for first, size in zip(*box, strict=True))))

    for _ in range(20):
        shape = tuple(draw.randint(2, 9) for _ in range(num_dims))
        cuts = [sorted({0, size, *draw.sample(range(size), draw.randint(0, 2))}) for size in shape]
        edges = [[*itertools.pairwise(dim)] for dim in cuts]
        boxes = [
            (tuple(low for low, _ in cell), tuple(high - low for low, high in cell))
            for cell in itertools.product(*edges)
        ]
        assert sum(math.prod(sizes) for _, sizes in boxes) == math.prod(shape)
        starts = [64 * number for number in range(len(boxes))]
        entry = TensorEntry.of("F32", shape, range(len(boxes)), starts, boxes)
        entry = TensorEntry.model_validate_json(entry.model_dump_json())
        assert [box for box, _, _ in entry.parts()] == boxes
        assert [start for _, _, start in entry.parts()] == starts
        first = tuple(draw.randrange(size) for size in shape)
        sizes = tuple(draw.randint(1, size - low) for low, size in zip(first, shape, strict=True))
        wanted = [(first, sizes), boxes[-1]]
        expected = [box for box in boxes if any(entries(box) & entries(want) for want in wanted)]
        assert [box for box, _, _ in entry.parts(wanted)] == expected


@pytest.mark.parametrize("name", ["../rank-00000.safetensors", "/etc/passwd", "rank-0.safetensors", "other", ""])
def test_a_manifest_names_files_of_ranks_and_no_others(tmp_path: Path, name: str) -> None:
    """Else a mirror would copy from anywhere."""
    entry = FileDigest(num_bytes=1, block_bytes=1, xxh3=("0",))
    CheckpointManifest(files={"rank-00000.safetensors": entry, "rank-123456.safetensors": entry}, tensors={})
    text = json.dumps({"files": {name: entry.model_dump(mode="json")}, "tensors": {}})
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(DamagedError, match="is no name of a rank's file"):
        read_manifest(tmp_path)
