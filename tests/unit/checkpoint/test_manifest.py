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

from nxtrain.checkpoint import directory
from nxtrain.checkpoint.manifest import Box, CheckpointManifest, TensorEntry, read_manifest
from nxtrain.checkpoint.save import write_state
from nxtrain.checkpoint.shard_files import LocatedShard, bytes_of, join, locate
from nxtrain.checkpoint.shards import TensorShard
from nxtrain.checkpoint.staging import Staged
from nxtrain.common.distributed.agreement import Ranks, StorageScope
from nxtrain.common.errors import CheckpointError, DamagedError
from nxtrain.common.io.checksummed_file import FileDigest
from nxtrain.common.mesh import Mesh
from nxtrain.common.sharding import Segment, ShardBox
from tests.support.run_folders import meta

RANKS, ROWS, NAMES = 64, 7, [f"layers.{number}.mlp.down_proj.weight" for number in range(12)]


def chunk(name: str, rank: int) -> TensorShard:
    """The rows of one rank, of a tensor that is cut over all of them."""
    shape, box = (RANKS * ROWS, 96), ((rank * ROWS, 0), (ROWS, 96))
    return TensorShard("exp_avg", name, name, shape, torch.float32, ShardBox(Segment("", shape[0]), *box, (0, 0), 0, 1))


def located(rank: int) -> list[LocatedShard]:
    """List of the shards of a rank, for the leader."""
    return locate(Staged({chunk(name, rank): torch.zeros(ROWS, 96) for name in NAMES}))


def test_a_shard_costs_few_bytes_on_its_way_and_in_the_manifest() -> None:
    lists = [located(rank) for rank in range(RANKS)]
    assert len(pickle.dumps(lists[5])) < 110 * len(NAMES)
    manifest = CheckpointManifest(files={}, tensors=join(lists))
    assert len(manifest.model_dump_json()) < 14 * RANKS * len(NAMES)


def test_the_shards_of_a_run_are_gathered_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staged, gathered = Staged({TensorShard.whole("w", (2, 3), torch.float32): torch.ones(2, 3)}), list[object]()

    def gather(ranks: Ranks, mine: object) -> list[object]:
        gathered.append(mine)
        return [mine]

    monkeypatch.setattr(Ranks, "gather_on_leader", gather)
    for step in (1, 2):
        write_state(directory.step_path(tmp_path, step), staged, meta(step), StorageScope(Ranks(Mesh(1, 0))))
    assert len(gathered) == 1
    first, second = (read_manifest(directory.step_path(tmp_path, step)) for step in (1, 2))
    assert first == second


def test_ranks_that_do_not_add_up_are_noticed() -> None:
    with pytest.raises(CheckpointError, match="shards of all ranks have 42,336 of its 43,008 entries"):
        join([located(rank) for rank in range(RANKS - 1)])


def test_a_reader_learns_of_the_parts_that_it_needs_only() -> None:
    entry = join([located(rank) for rank in range(RANKS)])[f"exp_avg/{NAMES[3]}"]
    parts = entry.parts([((3 * ROWS - 1, 0), (ROWS + 2, 1))])
    assert [file for _, file, _ in parts] == [f"rank-{rank:05d}.safetensors" for rank in (2, 3, 4)]


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
    with pytest.raises(DamagedError, match="is not the name of a rank's file"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "view",
    [
        torch.arange(6.0)[::2][1:2],
        torch.arange(6.0).view(3, 2).t()[1:, 2:],
        torch.arange(6.0)[3],
        torch.arange(6.0)[::2][:0],
        torch.arange(6.0).view(3, 2)[1:],
    ],
    ids=["strided", "transposed", "scalar", "empty", "rows"],
)
def test_the_bytes_of_a_view_are_those_of_its_copy(view: torch.Tensor) -> None:
    """A tensor of one entry is contiguous, whatever its stride."""
    assert bytes(bytes_of(view)) == view.clone().numpy().tobytes()
