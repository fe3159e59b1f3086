"""Functions of whole matrices, such as Muon's, for matrices whose rows and columns are sharded over ranks.

Each matrix is gathered on one rank from the rows and columns that all ranks hold, and the result is sent back. Every
rank runs the same collectives on tensors of the same shapes. On a lazy device, graphs do not depend on the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxtrain.common.distributed.collectives import Collectives
from nxtrain.common.family import CausalLM
from nxtrain.common.mesh import Axis, Mesh, StateAxes
from nxtrain.common.sharding import ParamTable, ShardSpec
from nxtrain.parallel.matrix_rounds import Round, num_helpers, piece_shape, rounds_of


def hidden_matrices(model: nn.Module, table: ParamTable) -> dict[str, ShardSpec]:
    """Sharding of all matrices inside of the blocks, including routers and experts, by parameter name."""
    inner: set[int] = set()
    for block in cast(CausalLM, model).blocks:
        inner.update(id(parameter) for parameter in block.parameters())
    matrices = {}
    for name, parameter in model.named_parameters():
        if id(parameter) in inner and parameter.dim() > 1:
            matrices[name] = table[name]
    return matrices


@dataclass(frozen=True)
class _Sharing:
    """Ranks that divide a set of whole matrices between them.

    Args:
        holders: Ranks of shard x tp, which together hold one copy of each matrix.
        helpers: Replicas of the holders, each of which computes some of the matrices.
        helper: (1,) position among the replicas as a tensor, since replicas run the same graph.
    """

    holders: Axis
    helpers: Axis
    helper: Tensor

    @property
    def size(self) -> int:
        """Number of ranks that divide the matrices."""
        return self.holders.size * self.helpers.size


class WholeMatrices:
    """Application of a function to whole sharded matrices, divided between the ranks of a pipeline stage.

    The ranks of shard x tp hold one copy of each matrix. They exchange rows, so that each rank gets whole matrices.
    Each replica of this copy computes some matrices, and all replicas gather the results. Under expert parallelism,
    only the ranks that hold the same experts divide the matrices of these experts.

    Attributes:
        rounds: Groups of matrices that are computed at once; each rank owns one matrix of a round or none.

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
        self._sharings: dict[bool, _Sharing] = {}
        self.rounds: list[Round] = []
        for expert, shard, axes in ((False, "shard", mesh.dense), (True, "expert_shard", mesh.experts)):
            own = {name: spec for name, spec in matrices.items() if spec.expert == expert}
            if not own:
                continue
            holders = mesh.over(shard, "tp")
            helpers = axes.replica.neighbours(num_helpers(axes.replica.size, holders.size, num_blocks))
            sharing = _Sharing(holders, helpers, put(torch.tensor([helpers.rank])))
            self._sharings[expert] = sharing
            self.rounds += rounds_of(own, sharing.size)

    def apply(self, of: Round, rows: Mapping[str, Tensor], function: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Apply a function to the whole (unsharded) matrices of a round, and return this rank's rows of the results.

        Args:
            of: One of `rounds`.
            rows: This rank's float32 rows of each matrix of the round, without padding or with zeros at the end. The
                rows may lie on another device than that of the exchange.
            function: Deterministic function of a whole segment as a separate matrix, to a matrix of the same shape.

        Returns:
            This rank's rows of the results, shaped like `rows`, on the same device.
        """
        sharing = self._sharings[of.spec.expert]
        holders, helpers = sharing.holders, sharing.helpers
        shape = piece_shape(of.spec, self._mesh.tp, _axes_of(of.spec, self._mesh).shard.size)
        home, device = rows[of.names[0]].device, sharing.helper.device
        idle = torch.zeros(shape, device=device)
        here = {name: _padded(x.to(device), 0, shape[0]) for name, x in rows.items()}
        pieces = torch.stack([here.get(name, idle) for name in of.owned])
        if helpers.size > 1:
            by_helper = pieces.unflatten(0, (helpers.size, holders.size))
            pieces = by_helper.index_select(0, sharing.helper).squeeze(0)
        gathered = self._comm.start_all_to_all(pieces, holders).wait()
        results = gathered
        if of.owned[helpers.rank * holders.size + holders.rank] or self._comm.lazy:
            segments = assemble(of.spec, self._mesh, gathered)
            results = divide(of.spec, self._mesh, {name: function(whole) for name, whole in segments.items()})
        returned = self._comm.start_all_to_all(results, holders).wait()
        everyones = self._comm.start_all_gather(returned, helpers).wait()
        matrices = {}
        for index, name in enumerate(of.owned):
            if name:
                matrices[name] = everyones[index, : rows[name].shape[0]].to(home)
        return matrices


def assemble(spec: ShardSpec, mesh: Mesh, pieces: Tensor) -> dict[str, Tensor]:
    """Assemble the whole segments of a matrix from the pieces that the ranks of shard x tp hold.

    Args:
        spec: Sharding of the matrix over tp.
        mesh: The axes.
        pieces: (shard * tp, rows, columns), each rank's rows with padding; of replicated pieces the first is taken.

    Returns:
        Segments by name.
    """
    tp = mesh.tp
    dim = spec.dim or 0
    shard_size = _axes_of(spec, mesh).shard.size
    num_rows = spec.local_shape(tp)[0]
    # (tp, rows of a shard, columns)
    shards = pieces.unflatten(0, (shard_size, tp.size)).transpose(0, 1).flatten(1, 2)[:, :num_rows]
    parts: dict[str, list[Tensor]] = {segment.name: [] for segment in spec.segments}
    for rank, shard in enumerate(shards.unbind()):
        for piece, view in spec.views(shard, replace(tp, rank=rank)):
            if piece.copy == 0 and piece.length:
                parts[piece.segment.name].append(view)
    return {name: torch.cat(views, dim) for name, views in parts.items()}


def divide(spec: ShardSpec, mesh: Mesh, segments: Mapping[str, Tensor]) -> Tensor:
    """Divide the whole segments of a matrix into pieces, one for each rank of shard x tp; the inverse of `assemble`."""
    tp = mesh.tp
    dim = spec.dim or 0
    shard_size = _axes_of(spec, mesh).shard.size
    shards = []
    for rank in range(tp.size):
        views = []
        for piece in spec.pieces(replace(tp, rank=rank)):
            view = segments[piece.segment.name].narrow(dim, piece.start, piece.length)
            views.append(_padded(view, dim, piece.local_length))
        shards.append(torch.cat(views, dim))
    num_rows, _ = piece_shape(spec, tp, shard_size)
    by_tp = _padded(torch.stack(shards), 1, num_rows * shard_size)
    pieces: Tensor = by_tp.unflatten(1, (shard_size, num_rows)).transpose(0, 1).flatten(0, 1)
    return pieces.contiguous()


def _axes_of(spec: ShardSpec, mesh: Mesh) -> StateAxes:
    return mesh.experts if spec.expert else mesh.dense


def _padded(x: Tensor, dim: int, size: int) -> Tensor:
    """Append zeros at the end of a dimension until it has the given size."""
    missing = size - x.shape[dim]
    if missing:
        x = F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, missing))
    return x
