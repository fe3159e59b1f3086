"""NeuronX Distributed's process groups: its order of ranks, and the check of its groups against a mesh.

NxD groups ranks by the wiring of an instance's chips: strided within a node of trn1 at tp 4, opposite rows together on
trn2 if tp takes half of the node.
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
    """Every rank once, in NxD's order of places [pp, dp, tp]; needs the default process group.

    Args:
        tp, pp: Degrees; their product divides the world.
        lnc: Physical cores per logical core.

    Raises:
        BackendError: NxD has no layout for these degrees, or one that is not a grid.
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
        raise BackendError(f"NeuronX Distributed's tensor parallel groups share ranks or lack some: {of_nxd.tp_groups}")
    mesh = Mesh.build(world, dist.get_rank(), tp=tp, pp=pp, order=order)
    _compare(mesh, {"tp": of_nxd.tp_groups, "dp": of_nxd.dp_groups, "pp": of_nxd.pp_groups})
    return order


def initialize(mesh: Mesh, *, lnc: int, meets: bool = True) -> None:
    """Make NxD's process groups, once, and check them against a mesh.

    Args:
        mesh: The axes of this rank.
        lnc: Physical cores per logical core.
        meets: All ranks exist, and run NxD's initial all-reduce.

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
    """True if NxD sums gradients over the data parallel ranks; NxD's groups must have been made.

    NxD sums over the groups of expert parallelism. Without experts they equal the data parallel groups, except on a
    trn2 with an order by rows of chips: there they are ascending, and join ranks that hold different shards.
    """
    return _agree(mesh.dp, get_expert_data_parallel_replica_groups())


def forget() -> None:
    """Drop NxD's process groups, so that another run in this process can make its own."""
    destroy_model_parallel()


def _compare(mesh: Mesh, of_nxd: dict[str, Groups]) -> None:
    for name, theirs in of_nxd.items():
        axis: Axis = mesh.over(name)
        if not _agree(axis, theirs):
            raise BackendError(
                f"NeuronX Distributed groups ranks over {name} as {_some(theirs)}, this run as {_some(axis.groups)}; "
                "use backend.layers=native"
            )


def _agree(axis: Axis, theirs: Groups) -> bool:
    # The order of the groups does not matter, but the order of ranks in a group does.
    return {tuple(group) for group in theirs} == set(axis.groups)


def _some(groups: Groups | tuple[tuple[int, ...], ...]) -> str:
    shown = ", ".join(str(list(group)) for group in groups[:2])
    return f"{shown} ..." if len(groups) > 2 else shown  # noqa: PLR2004
