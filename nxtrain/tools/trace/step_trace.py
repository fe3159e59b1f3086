"""Order of all-gathers, forward and backward passes, and reduce-scatters in a step under FSDP2.

A recorder wraps the collectives of each FSDP unit. It works on a rank of a real run, and on a simulated rank whose
tensors have no storage.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule

from nxtrain.common.errors import ConfigError, Problem
from nxtrain.common.family import CausalLM
from nxtrain.config.check import Resolved
from nxtrain.config.schema import FULLY_SHARDED
from nxtrain.parallel.fully_sharded import embedding_and_head
from nxtrain.plan.job import Job
from nxtrain.tools.trace.fake_rank import FakeBackend, zero_batch
from nxtrain.train.build import build_mesh, build_model, build_state
from nxtrain.train.step import train_step

OUTER = ("embedding", "head")
"""Names of the FSDP units of embedding and LM head; a block's unit has the index of its first block."""

REST = "rest"
"""Name of the FSDP unit of the final norm, and of a weight tied between embedding and LM head."""


class _Recorded:
    """FSDP2 collective that records the name of the unit that it gathers or reduces."""

    def __init__(self, event: str, events: list[str]) -> None:
        self._event, self._events = event, events

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the unsharded side of the collective."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any = None, async_op: bool = False
    ) -> Any:
        self._events.append(self._event)
        if op is None:
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


class _Backward(torch.autograd.Function):
    """Identity function whose backward pass records an event."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, events: list[str], event: str) -> Tensor:
        ctx.note = lambda: events.append(event)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.note()
        return grads[0], None, None


def record_events(model: nn.Module) -> list[str]:
    """Record events of a fully sharded `CausalLM`, and return the list to which later steps append them.

    Events are `gather`, `forward`, `backward` and `reduce`, each with the name of its FSDP unit or block.
    """
    events: list[str] = []
    _record(model, REST, events)
    for end, unit in zip(embedding_and_head(model), OUTER, strict=True):
        if end is not None:
            _record(end, unit, events)
    units: dict[int, nn.Module] = {}
    lm: CausalLM = model  # type: ignore[assignment]
    for index, block in enumerate(lm.blocks):
        assert isinstance(block, FSDPModule)
        if units.setdefault(id(block._get_fsdp_state()), block) is block:
            _record(block, str(index), events)

        def forward(module: nn.Module, args: Any, index: int = index) -> None:
            events.append(f"forward {index}")

        def backward(module: nn.Module, args: Any, out: Tensor, index: int = index) -> Any:
            return _Backward.apply(out, events, f"backward {index}")

        block.register_forward_pre_hook(forward)  # runs after FSDP's hook, which has gathered by then
        block.register_forward_hook(backward, prepend=True)  # inside FSDP's hook, which gathers before backward
    return events


def _record(module: nn.Module, unit: str, events: list[str]) -> None:
    assert isinstance(module, FSDPModule)
    module.set_custom_all_gather(_Recorded(f"gather {unit}", events))  # type: ignore[arg-type]
    module.set_custom_reduce_scatter(_Recorded(f"reduce {unit}", events))  # type: ignore[arg-type]


def trace_step(resolved: Resolved, job: Job) -> list[str]:
    """Trace the events of a step with one micro-batch on rank 0, in order, without computing values.

    Raises:
        ConfigError: The layout has no FSDP units to gather, or has pipeline stages.
    """
    parallel, train = job.config.parallel, job.config.train
    if not job.is_fully_sharded:
        reason = f"{parallel.shard} over {job.shard_size} ranks gathers no FSDP units, so there is no order to trace"
        hint = f"use one of {', '.join(FULLY_SHARDED)}, with parallel.dp=2 or more"
        raise ConfigError([Problem("parallel.shard", reason, hint=hint)])
    if parallel.pp > 1:
        reason = f"a trace shows a step without pipeline stages, but there are {parallel.pp}"
        raise ConfigError([Problem("parallel.pp", reason, hint="use parallel.pp=1")])
    one = train.model_copy(update={"global_batch": parallel.dp * train.micro_batch})
    compile_ = job.config.compile.model_copy(update={"torch_compile": False})
    plan = Resolved(job.config.model_copy(update={"train": one, "compile": compile_}), resolved.family, resolved.model)
    devices = job.machine.devices
    backend = FakeBackend(job.world, 0, devices, job.full_attention, job.windowed_attention)
    with closing(backend), FakeTensorMode(allow_non_fake_inputs=True):
        mesh = build_mesh(plan, job.world, 0, devices)
        backend.lay_out(mesh)
        state = build_state(plan, build_model(plan, backend, mesh, init="zeros"), backend, mesh)
        events = record_events(state.model)
        for _ in range(2):  # the first step creates FSDP's hooks
            events.clear()
            train_step(state, zero_batch(plan, state), 1e-3)
    return events
