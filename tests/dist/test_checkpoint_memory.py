"""Loading and exporting take memory for a tensor, not for a checkpoint, as Linux counts resident memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from nxtrain.backends.base import Backend
from nxtrain.checkpoint import directory, shard_files
from nxtrain.checkpoint.convert import streamed
from nxtrain.checkpoint.convert.hf import nxtrain_to_hf
from nxtrain.checkpoint.load import load
from nxtrain.common.io import checksummed_file
from nxtrain.common.mesh import Mesh
from nxtrain.common.sharding import Layout
from tests.support.memory import returns_pages, rise_bytes
from tests.support.parity import layout as layout_of
from tests.support.ranks import RankPool
from tests.support.run_folders import blank, cut, meta, same, save, table, whole

MODEL: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
KINDS = {"model": torch.bfloat16}
LARGEST_BYTES = 32000 * 1024 * 2
TOTAL_BYTES = 2 * LARGEST_BYTES + 4 * (3 * 4096 + 2 * 1024 + 2 * 256) * 1024 * 2
SCALE = 4
BOUND = 1.2


class Scaled:
    """The sizes that memory depends on, smaller while this is open; ranks live on."""

    def __enter__(self) -> None:
        self._sizes = checksummed_file.BLOCK_BYTES, shard_files.PIECE_BYTES, streamed.BATCH_BYTES
        self._set(*(size // SCALE for size in self._sizes))

    def __exit__(self, *_: object) -> None:
        self._set(*self._sizes)

    def _set(self, block: int, piece: int, batch: int) -> None:
        checksummed_file.BLOCK_BYTES, shard_files.PIECE_BYTES, streamed.BATCH_BYTES = block, piece, batch


def save_alone(backend: Backend, path: Path, sizes: dict[str, Any]) -> None:
    mesh = Mesh(1, 0)
    specs = table("gqa2", mesh, config=sizes)
    config = layout_of("gqa2", tp=1, config=sizes).model.model_dump(mode="json")
    with Scaled():
        save(path, cut(specs, mesh, KINDS), Layout(specs, mesh), meta(config=config))


def load_measured(backend: Backend, path: Path) -> tuple[int, bool]:
    mesh = Mesh.build(backend.world, backend.rank, tp=backend.world)
    specs = table("gqa2", mesh, config=MODEL)
    wanted = cut(specs, mesh, KINDS)
    shards, held = blank(wanted), Layout(specs, mesh)
    returns_pages()
    with Scaled():
        rise = rise_bytes(lambda: load(path, shards, held))
    return rise, same(shards, wanted)


def export_measured(backend: Backend, path: Path, small: Path, out: Path) -> int:
    nxtrain_to_hf(small, out.with_name("small"))  # imports what only a first export does
    returns_pages()
    with Scaled():
        return rise_bytes(lambda: nxtrain_to_hf(path, out))


def test_memory_follows_the_largest_tensor(ranks: RankPool, tmp_path: Path) -> None:
    """Beside the shards that are loaded, and in an export of one file that holds all tensors."""
    path = directory.step_path(tmp_path, 10)
    small = directory.step_path(tmp_path / "other", 10)
    for item, sizes in ((path, MODEL), (small, {})):
        item.parent.mkdir(exist_ok=True)
        ranks.run(1, save_alone, item, sizes)
    assert TOTAL_BYTES > 3 * LARGEST_BYTES
    for rank, (rise, equal) in enumerate(ranks.run(2, load_measured, path)):
        assert equal
        assert rise <= BOUND * LARGEST_BYTES, f"rank {rank}: {rise:,} bytes"
    fresh = RankPool()  # memory that a process has freed and kept would hide what it takes anew
    try:
        (rise,) = fresh.run(1, export_measured, path, small, tmp_path / "export")
    finally:
        fresh.close()
    assert rise <= BOUND * LARGEST_BYTES, f"{rise:,} bytes"
    with safe_open(tmp_path / "export" / "model.safetensors", framework="pt") as file:
        name = "lm_head.weight"
        assert torch.equal(file.get_tensor(name), whole(f"model/{name}", (32000, 1024), torch.bfloat16))


def test_the_sizes_that_were_scaled_hold_the_bound_for_llama_2_7b() -> None:
    """A batch beside the blocks under way; the second number is vocabulary x hidden size x 2 bytes."""
    assert streamed.BATCH_BYTES + 4 * checksummed_file.BLOCK_BYTES <= BOUND * 32000 * 4096 * 2
