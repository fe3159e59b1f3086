"""NeuronX Distributed's process groups: rank order, creation, and a check against nxtrain's mesh.

NxD groups ranks by the interconnect of an instance's chips. On trn1 with tp 4 the groups are strided within a node. On
trn2, if tp is half of the node, a group joins opposite rows of chips.
"""

from __future__ import annotations

from itertools import chain

import torch.distributed as dist
from neuronx_distributed.parallel_layers.parallel_state import (
    destroy_model_parallel,
    get_data_parallel_replica_groups,
    get_expert_data_parallel_replica_groups,
    get_pipeline_model_parallel_replica_groups,
    get_tensor_model_parallel_replica_groups,
    initialize_model_parallel,
    model_parallel_is_initialized,
)

from nxtrain.common.errors import BackendError
from nxtrain.common.mesh import Axis, Mesh

Groups = list[list[int]]


def rank_order(*, tp: int, pp: int, lnc: int) -> tuple[int, ...]:
    """Return all ranks in NxD's order of mesh places [pp, dp, tp]; needs torch's default process group.

    Args:
        tp, pp: Tensor and pipeline parallel degrees, whose product divides the world size.
        lnc: Physical cores per logical core.

    Raises:
        BackendError: NxD has no groups for these degrees, or its groups do not form a grid.
    """
    try:
        of_nxd = initialize_model_parallel(
            tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, lnc_size=lnc, mesh_only=True
        )
    except (
        ArithmeticError,
        AssertionError,
        RuntimeError,
        ValueError,
    ) as error:  # NxD does not check its divisions and shapes
        raise BackendError(
            f"NeuronX Distributed cannot lay out tp={tp}, pp={pp} over {dist.get_world_size()} ranks on this instance: "
            f"{error}; use another parallel.tp, or backend.layers=native"
        ) from error
    world = dist.get_world_size()
    order = tuple(chain.from_iterable(of_nxd.tp_groups))
    if sorted(order) != list(range(world)):
        raise BackendError(
            f"NeuronX Distributed's tensor parallel groups do not have every rank exactly once: {of_nxd.tp_groups}; "
            "use another parallel.tp, or backend.layers=native"
        )
    mesh = Mesh.build(world, dist.get_rank(), tp=tp, pp=pp, order=order)
    _compare(mesh, {"tp": of_nxd.tp_groups, "dp": of_nxd.dp_groups, "pp": of_nxd.pp_groups})
    return order


def initialize(mesh: Mesh, *, lnc: int, meets: bool = True) -> None:
    """Create NxD's process groups once, and check that they equal the groups of a mesh.

    Args:
        mesh: Mesh with the axes of this rank.
        lnc: Physical cores per logical core.
        meets: All ranks of the world exist, and take part in NxD's initial all-reduce.

    Raises:
        BackendError: The groups differ from those of the mesh.
    """
    if not model_parallel_is_initialized():
        initialize_model_parallel(
            tensor_model_parallel_size=mesh.tp_size,
            pipeline_model_parallel_size=mesh.pp_size,
            skip_collective_init=not meets,
            lnc_size=lnc,
        )
    of_nxd = {
        "tp": get_tensor_model_parallel_replica_groups(),
        "dp": get_data_parallel_replica_groups(),
        "pp": get_pipeline_model_parallel_replica_groups(),
    }
    _compare(mesh, of_nxd)


def sums_over_dp(mesh: Mesh) -> bool:
    """True if NxD's gradient all-reduce covers exactly the data parallel ranks; call after `initialize`.

    NxD sums gradients over its expert data parallel groups. Without experts these equal the data parallel groups. On a
    trn2 with ranks ordered by rows of chips they do not: they are ascending, and join ranks with different shards.
    """
    return _agree(mesh.dp, get_expert_data_parallel_replica_groups())


def forget() -> None:
    """Destroy NxD's process groups, so that another run in this process can create its own."""
    destroy_model_parallel()


def _compare(mesh: Mesh, of_nxd: dict[str, Groups]) -> None:
    for name, theirs in of_nxd.items():
        axis: Axis = mesh.over(name)
        if not _agree(axis, theirs):
            raise BackendError(
                f"NeuronX Distributed has the {name} groups {_some(theirs)}, but this run has {_some(axis.groups)}; "
                "use backend.layers=native"
            )


def _agree(axis: Axis, theirs: Groups) -> bool:
    # The order of the groups does not matter, but the order of ranks in a group does.
    return {tuple(group) for group in theirs} == set(axis.groups)


def _some(groups: Groups | tuple[tuple[int, ...], ...]) -> str:
    shown = ", ".join(str(list(group)) for group in groups[:2])
    return f"{shown} ..." if len(groups) > 2 else shown  # noqa: PLR2004
