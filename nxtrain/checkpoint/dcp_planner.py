"""Planners for `torch.distributed.checkpoint`: the shards that each rank writes and reads."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from nxtrain.checkpoint.shards import TensorShard, mismatches
from nxtrain.common.errors import CheckpointError


class ChunkSavePlanner(SavePlanner):
    """Plans the write of this rank's shards; `read` fetches a shard to the host, immediately before its write."""

    def __init__(self, chunks: Sequence[TensorShard], read: Callable[[TensorShard], Tensor]) -> None:
        self._chunks = {chunk.index: chunk for chunk in chunks}
        self._read = read

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Do nothing: the shards are already determined."""

    def create_local_plan(self) -> SavePlan:
        """List the shards that this rank writes."""
        return SavePlan(
            [
                WriteItem(
                    index,
                    WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        chunk.box, TensorProperties(dtype=chunk.dtype), torch.Size(chunk.shape)
                    ),
                )
                for index, chunk in self._chunks.items()
            ]
        )

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Accept the plans: the storage decides the location of each shard."""
        return all_plans, Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Accept the plan of all ranks."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Fetch a shard."""
        return self._read(self._chunks[write_item.index])


class ChunkLoadPlanner(LoadPlanner):
    """Plans the read of this rank's shards; the coordinator first compares the checkpoint with the model.

    Args:
        targets: Host tensor to fill for each shard of this rank, of the shard's shape.
        complete: Kinds that must match exactly: a tensor of these kinds that no rank wants is an error.
        padded: Host tensors to set to zero before the read, once the checkpoint is confirmed to fit.
    """

    def __init__(
        self, targets: Mapping[TensorShard, Tensor], complete: Collection[str] = (), padded: Sequence[Tensor] = ()
    ) -> None:
        self._chunks = tuple(targets)
        self._targets = {chunk.index: target for chunk, target in targets.items()}
        self._complete, self._padded = complete, padded
        self._items: list[ReadItem] = []

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the checkpoint's list of tensors."""
        assert metadata is not None
        stored = metadata.state_dict_metadata
        self._stored = {key: tensor for key, tensor in stored.items() if isinstance(tensor, TensorStorageMetadata)}

    def create_local_plan(self) -> LoadPlan:
        """Plan this rank's reads, and list the type and shape of each expected tensor."""
        items: list[ReadItem] = []
        for chunk in self._chunks:
            if chunk.key in self._stored:
                items.extend(create_read_items_for_chunk_list(chunk.key, self._stored[chunk.key], [chunk.box]))
        self._items = items  # stored here: the coordinator would otherwise receive the reads of all ranks
        wanted = {chunk.key: describe(chunk.shape, chunk.dtype) for chunk in self._chunks}
        return LoadPlan([], planner_data=wanted)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Refuse a checkpoint whose tensors differ from those that the ranks expect, before any tensor is read."""
        wanted: dict[str, str] = {}
        for plan in global_plan:
            wanted.update(plan.planner_data)
        stored = {
            key: describe(tensor.size, tensor.properties.dtype)
            for key, tensor in self._stored.items()
            if key in wanted or key.partition("/")[0] in self._complete
        }
        problems = mismatches(wanted, stored)
        if problems:
            kinds = ", ".join(sorted({key.partition("/")[0] for key in self._stored}))
            raise CheckpointError("\n".join(["it does not fit the model", *problems, f"it holds: {kinds}"]))
        return [LoadPlan([]) for _ in global_plan]

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Zero the padding, and return this rank's reads."""
        for tensor in self._padded:
            tensor.zero_()
        return LoadPlan(self._items)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Refuse: a checkpoint holds tensors only, so `load_bytes` is never called."""
        raise NotImplementedError

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """View of the entries of a target that one stored shard fills."""
        target = self._targets[read_item.dest_index]
        return narrow_tensor_by_index(target, read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: targets are filled in place."""


def describe(shape: Sequence[int], dtype: torch.dtype) -> str:
    """Text for a tensor's type and shape, such as `bfloat16 (512, 64)`."""
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)}"
