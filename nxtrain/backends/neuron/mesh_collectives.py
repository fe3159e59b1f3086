"""Collectives over the process groups of a torch device mesh, which TorchNeuron's compiler needs."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh

from nxtrain.common.distributed.c10d_collectives import C10dCollectives
from nxtrain.common.mesh import Mesh, StateAxes
from nxtrain.common.process.greetings import suppress_gloo_messages


class MeshCollectives(C10dCollectives):
    """Collectives whose process groups of the axes pp, replica, shard and tp come from one `init_device_mesh`.

    A compiled graph contains all replica groups of its collectives, including groups without this rank. TorchNeuron
    reads the groups from the device mesh. Groups over several axes are used outside of compiled graphs only.

    Transfers between pipeline stages use the group of the pp axis, as in `torch.distributed.pipelining`.

    Source: torch/guides/torch-distributed.html in https://awsdocs-neuron.readthedocs-hosted.com/en/latest: all of its
    examples make groups by `init_device_mesh`.

    Args:
        world: Number of ranks.
        device_type: Type of the device.
    """

    def __init__(self, world: int, device_type: str) -> None:
        super().__init__(world)
        self._device_type = device_type
        self._root: DeviceMesh | None = None

    def lay_out(self, mesh: Mesh) -> None:
        if self._world > 1:
            axes = {axis.name: axis for axis in (mesh.pp, mesh.replica, mesh.shard, mesh.tp) if axis.size > 1}
            with suppress_gloo_messages():
                self._root = device_mesh.init_device_mesh(
                    self._device_type, tuple(axis.size for axis in axes.values()), mesh_dim_names=tuple(axes)
                )
            for name, axis in axes.items():
                group = self._root.get_group(name)
                assert dist.get_process_group_ranks(group) == list(axis.group_of(mesh.rank)), axis
                self._groups[axis.groups] = group
        super().lay_out(mesh)

    def _link(self, mesh: Mesh) -> None:
        """Make no two-rank groups for pipeline transfers, since the group of the pp axis carries all of them."""

    def device_mesh(self, device: str, axes: StateAxes) -> DeviceMesh:
        assert self._root is not None, "a mesh is laid out before parameters are sharded"
        if axes.shard.name not in (self._root.mesh_dim_names or ()):
            return super().device_mesh(device, axes)
        return self._root[("shard",) if axes.replica.size == 1 else ("replica", "shard")]

    def forget(self) -> None:
        super().forget()
        self._root = None
