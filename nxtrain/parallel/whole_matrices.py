"""Whole matrices on one rank each, gathered from the rows and columns that ranks hold, and their results sent back.

Every rank runs the same collectives on tensors of the same shapes. On a lazy device, graphs do not depend on the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxtrain.common.dimensions import is_matrix
from nxtrain.common.distributed.collectives import Collectives
from nxtrain.common.family import CausalLM
from nxtrain.common.mesh import Axis, Mesh
from nxtrain.common.sharding import ParamTable, ShardSpec
from nxtrain.parallel.matrix_rounds import Round, num_helpers, piece_shape, rounds_of


def hidden_matrices(model: nn.Module, table: ParamTable) -> dict[str, ShardSpec]:
    """Sharding of the weights of all linear layers of the blocks, by parameter name."""
    inner: set[int] = set()
    for block in cast(CausalLM, model).blocks:
        inner.update(id(parameter) for parameter in block.parameters())
    matrices = {}
    for name, parameter in model.named_parameters():
        if id(parameter) in inner and is_matrix(table[name]):
            matrices[name] = table[name]
    return matrices


class WholeMatrices:
    """Functions of whole matrices, whose work the ranks of a pipeline stage share.

    The ranks of shard x tp hold one copy of each matrix, and exchange rows for whole matrices. Replicas of this copy
    compute some matrices each, and gather the results of all.

    Attributes:
        rounds: Matrices that are computed at once; each rank owns one matrix or none.

    Args:
        matrices: Sharding over tp of each matrix, in the order of the model.
        mesh: The axes of this rank.
        num_blocks: Blocks of a pipeline stage, equal on all ranks of the run.
        comm: Collectives.
        put: Copies a host tensor to the device.
    """

    def __init__(
        self,
        matrices: Mapping[str, ShardSpec],
        mesh: Mesh,
        num_blocks: int,
        comm: Collectives,
        put: Callable[[Tensor], Tensor],
    ) -> None:
        self._mesh, self._comm = mesh, comm
        self._holders = mesh.over("shard", "tp")
        self._helpers = mesh.replica.neighbours(num_helpers(mesh.replica.size, self._holders.size, num_blocks))
        self.rounds = rounds_of(matrices, self._holders.size * self._helpers.size)
        self._place = self._helpers.rank * self._holders.size + self._holders.rank
        # Data, since replicas run the same graph.
        self._helper = put(torch.tensor([self._helpers.rank]))

    def apply(self, of: Round, rows: Mapping[str, Tensor], function: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Apply a function to each segment of the matrices of a round.

        Args:
            of: One of `rounds`.
            rows: This rank's float32 rows of each matrix of the round, without padding or with zeros at the end. The
                rows may lie on another device than that of the exchange.
            function: Deterministic function of a whole segment as a matrix of its own, to a matrix of the same shape.

        Returns:
            This rank's rows of the results, shaped like `rows`, on the same device.
        """
        shape = piece_shape(of.spec, self._mesh.tp, self._mesh.shard.size)
        home, device = rows[of.names[0]].device, self._helper.device
        idle = torch.zeros(shape, device=device)
        here = {name: _padded(x.to(device), 0, shape[0]) for name, x in rows.items()}
        pieces = torch.stack([here.get(name, idle) for name in of.owned])
        if self._helpers.size > 1:
            by_helper = pieces.unflatten(0, (self._helpers.size, self._holders.size))
            pieces = by_helper.index_select(0, self._helper).squeeze(0)
        gathered = self._comm.start_all_to_all(pieces, self._holders).wait()
        results = gathered
        if of.owned[self._place] or self._comm.lazy:
            segments = assemble(of.spec, self._mesh, gathered)
            results = divide(of.spec, self._mesh, {name: function(whole) for name, whole in segments.items()})
        returned = self._comm.start_all_to_all(results, self._holders).wait()
        everyones = self._comm.start_all_gather(returned, self._helpers).wait()
        found = {}
        for index, name in enumerate(of.owned):
            if name:
                found[name] = everyones[index, : rows[name].shape[0]].to(home)
        return found


def assemble(spec: ShardSpec, mesh: Mesh, pieces: Tensor) -> dict[str, Tensor]:
    """Whole segments of a matrix by name, from the pieces that the ranks of shard x tp hold.

    Args:
        spec: Sharding of the matrix over tp.
        mesh: The axes.
        pieces: (shard * tp, rows, columns), each rank's rows with padding; of replicas the first is taken.
    """
    tp, dim = mesh.tp, spec.dim or 0
    num_rows = spec.local_shape(tp)[0]
    # (tp, rows of a shard, columns)
    shards = pieces.unflatten(0, (mesh.shard.size, tp.size)).transpose(0, 1).flatten(1, 2)[:, :num_rows]
    parts: dict[str, list[Tensor]] = {segment.name: [] for segment in spec.segments}
    for rank, shard in enumerate(shards.unbind()):
        for piece, view in spec.views(shard, _seen_from(tp, rank)):
            if piece.copy == 0 and piece.length:
                parts[piece.segment.name].append(view)
    return {name: torch.cat(views, dim) for name, views in parts.items()}


def divide(spec: ShardSpec, mesh: Mesh, segments: Mapping[str, Tensor]) -> Tensor:
    """Pieces of whole segments for each rank of shard x tp: the inverse of `assemble`."""
    tp, dim = mesh.tp, spec.dim or 0
    shards = []
    for rank in range(tp.size):
        views = []
        for piece in spec.pieces(_seen_from(tp, rank)):
            view = segments[piece.segment.name].narrow(dim, piece.start, piece.length)
            views.append(_padded(view, dim, piece.local_length))
        shards.append(torch.cat(views, dim))
    num_rows, _ = piece_shape(spec, tp, mesh.shard.size)
    by_tp = _padded(torch.stack(shards), 1, num_rows * mesh.shard.size)
    pieces: Tensor = by_tp.unflatten(1, (mesh.shard.size, num_rows)).transpose(0, 1).flatten(0, 1)
    return pieces.contiguous()


def _seen_from(tp: Axis, rank: int) -> Axis:
    return replace(tp, rank=rank)


def _padded(x: Tensor, dim: int, size: int) -> Tensor:
    """Tensor with zeros at the end of a dimension, of a given size."""
    missing = size - x.shape[dim]
    if missing:
        x = F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, missing))
    return x
