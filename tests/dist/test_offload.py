"""With `parallel.offload`, shards with their gradients, or the state of the optimizer and its updates, are on the host.

The device of these ranks is the host as well. Tensors for the device are therefore recorded as they pass: in `put`, and
in the kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from nxtrain.backends.base import Backend
from nxtrain.backends.torch_kernels import PlainKernels
from nxtrain.common.kernels import AdamStep
from nxtrain.config.check import Resolved
from nxtrain.optim.update_rules import Elsewhere
from nxtrain.train.step import TrainState, train_step
from tests.support.models import changed, weights_of
from tests.support.parity import batches, layout, local_batch, start
from tests.support.ranks import RankPool


class _Kernels(PlainKernels):
    def __init__(self) -> None:
        self.updates = 0

    def adamw(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        how: AdamStep,
    ) -> None:
        self.updates += 1
        super().adamw(params, grads, exp_avgs, exp_avg_sqs, how)


@dataclass(frozen=True)
class Places:
    """Places of the tensors that an update needs."""

    offloads: list[bool]
    put: set[str]
    kept: set[str]
    host_updates: int
    device_updates: int
    copied: bool


def places(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor]) -> Places:
    """Of a run after its first step."""
    device, host = _Kernels(), _Kernels()
    backend.host_kernels = host
    uploaded: list[Tensor] = []  # kept, so that no address is used twice
    sound = backend.put

    def put(x: Tensor) -> Tensor:
        uploaded.append(sound(x).clone())
        return uploaded[-1]

    backend.put = put  # type: ignore[method-assign]
    backend.kernels.adamw = device.adamw  # type: ignore[method-assign]
    state = start(backend, resolved, weights)
    (batch,) = batches(resolved, 1)
    train_step(state, local_batch(state, batch, resolved.config.train.micro_batch), 1e-3)
    addresses = {tensor.data_ptr() for tensor in uploaded}
    tensors = _tensors_of_the_update(state)
    put_names = {name for name, tensor in tensors.items() if tensor.data_ptr() in addresses}
    offloads = [
        parameter.offload_to_cpu
        for module in state.model.modules()
        if isinstance(module, FSDPModule)
        for parameter in module._get_fsdp_state()._fsdp_param_group.fsdp_params  # type: ignore[union-attr]
    ]
    copied = any(isinstance(tile.param, Elsewhere) for tiles, _ in state.optimizer._groups for tile in tiles)
    return Places(offloads, put_names, tensors.keys() - put_names, host.updates, device.updates, copied)


def _tensors_of_the_update(state: TrainState) -> dict[str, Tensor]:
    optimizer, gradients = state.optimizer, state.gradients
    result = {f"{kind} {name}": x for kind, item in optimizer.state.items() for name, x in item.items()}
    for kind, keys in optimizer._keys.items():
        result |= {f"{kind} key {name}": key.rows for name, key in keys.items()}
    return result | {"num_updates": optimizer.num_updates, "weights of norms": gradients.square_sum._weights}


STATE = ("params", "optimizer")


# zero1 keeps whole parameters, which stay on the device.
OFFLOADED = [
    (shard, dp, offload)
    for shard, dp in (("full", 2), ("grad_op", 2), ("hybrid", 4), ("zero1", 2))
    for offload in ((), STATE, ("params",), ("optimizer",), ("activations",))
    if not (shard == "zero1" and "params" in offload)
]


@pytest.mark.parametrize(("shard", "dp", "offload"), OFFLOADED, ids=str)
def test_what_an_update_needs_is_on_the_host_where_that_is_asked_for_and_on_the_device_elsewhere(
    ranks: RankPool, shard: str, dp: int, offload: tuple[str, ...]
) -> None:
    size = 2 if shard == "hybrid" else 0
    resolved = layout("gqa2", tp=1, dp=dp, micro=1, params="bf16", update="bf16_stochastic", shard=shard)
    resolved = changed(resolved, parallel={"offload": offload, "shard_size": size}, precision={"state": "bf16"})
    if shard == "hybrid":
        resolved = changed(resolved, precision={"reduce": "fp32", "accumulate": "fp32"})
    update, shards = "optimizer" in offload, "params" in offload
    for result in ranks.run(dp, places, resolved, weights_of(resolved)):
        assert set(result.offloads) == (set() if shard == "zero1" else {shards})
        norms = {"weights of norms"}
        assert norms <= (result.kept if shards else result.put)
        everything = result.kept | result.put
        assert everything - norms <= (result.kept if update else result.put)
        assert (result.host_updates > 0, result.device_updates > 0) == (update, not update)
        assert result.copied == (shards != update)
