"""Copies between a pretended GPU and the host: pinned, without waits, and zeros that the device makes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import pytest

from tests.cuda_sim.test_steps import step_alone
from tests.support.cuda_sim import Record, SimulatedGpu, opened_gpu, recorded

NUM_BYTES = 2 * 64 * 96 * 4


def staged_twice(lock: bool) -> tuple[Record, Record]:
    """Records of the second copy of some tensors for a checkpoint, and of the wait for it."""
    import torch

    from nxtrain.checkpoint.staging import Staging
    from nxtrain.common.mesh import Mesh
    from nxtrain.common.sharding import Layout, ParamTable, ShardSpec

    table = ParamTable({name: ShardSpec((64, 96)) for name in ("a", "b")})
    with opened_gpu() as backend:
        shards = {"model": {name: torch.zeros(64, 96, device="cuda") for name in table}}
        staging = Staging(Layout(table, Mesh.build(1, 0)), backend.pin if lock else lambda memory: None)
        staging.fill(shards)
        with recorded() as copies:
            staged = staging.fill(shards)
        with recorded() as wait:
            staged.arrived()
        staging.release()
    return copies, wait


@pytest.mark.parametrize("lock", [True, False])
def test_the_host_queues_the_copies_of_a_checkpoint_and_the_writer_waits(gpu: SimulatedGpu, lock: bool) -> None:
    copies, wait = gpu.run(staged_twice, lock)
    if not lock:
        assert len(copies.pageable_copies) == 2  # as without pinning
        return
    assert copies.host_waits == [] and copies.copied_bytes == {("device", "pinned"): NUM_BYTES}
    assert len(wait.host_waits) == 1


def test_activations_go_to_pinned_memory_and_back_without_a_wait(gpu: SimulatedGpu) -> None:
    record = gpu.run(step_alone, {"parallel": {"offload": ("activations",)}})
    assert record.host_waits == []
    out, back = (record.copied_bytes[way] for way in (("device", "pinned"), ("pinned", "device")))
    assert 0 < back < out  # the last block's stay


def layouts_after_offload() -> list[tuple[object, object]]:
    """Shape and strides of tensors that autograd saves in two blocks, before and after their stay on the host."""
    import torch
    from torch import Tensor, nn

    from nxtrain.nn.offload import Transfers, saved_on_host

    pairs: list[tuple[object, object]] = []

    class Saving(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            views = [x, x[..., 2:6], x.permute(1, 0, 2), x.transpose(0, 1)[:, ::2], x[:1].expand(3, -1, -1), x[:0]]
            views += [x.flatten().unfold(0, 4, 2), x[..., :1].expand(-1, -1, 7)]
            ctx.save_for_backward(*views)
            ctx.layouts = [(view.shape, view.stride()) for view in views]
            return x + 1

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            pairs.extend(zip(ctx.layouts, [(view.shape, view.stride()) for view in ctx.saved_tensors], strict=True))
            return grad

    with opened_gpu():
        x = torch.zeros(4, 6, 10, device="cuda", requires_grad=True)
        transfers, block = Transfers(), nn.Module()
        for _ in range(2):
            with saved_on_host(block, transfers):
                x = Saving.apply(x)
        x.sum().backward()
    return pairs


def test_activations_come_back_with_their_shape_and_strides(gpu: SimulatedGpu) -> None:
    """A compiled function, such as FlexAttention, ends the run for others. The first block's tensors were freed."""
    pairs = gpu.run(layouts_after_offload)
    assert len(pairs) == 16 and all(before == after for before, after in pairs), pairs


def state_made() -> Record:
    """Record of the making of an optimizer's state."""
    import torch

    from nxtrain.common.mesh import Mesh
    from nxtrain.common.sharding import Layout, ParamTable, ShardSpec
    from nxtrain.config.schema import OptimConfig
    from nxtrain.optim.adamw import AdamW
    from tests.support.adamw import precision

    layout = Layout(ParamTable({"w": ShardSpec((640, 960))}), Mesh.build(1, 0))
    types = precision(torch.bfloat16, "fp32_master")
    with opened_gpu() as backend:
        params = {"w": torch.zeros(640, 960, dtype=torch.bfloat16, device="cuda")}
        with recorded() as record:
            AdamW(params, layout, backend.kernels, backend.put, precision=types, seed=0, optim=OptimConfig())
    return record


def test_the_device_makes_the_zeros_of_an_optimizer(gpu: SimulatedGpu) -> None:
    copied = gpu.run(state_made).copied_bytes
    assert copied["pinned", "device"] + copied["pageable", "device"] < 1024


def memory_of_marks() -> tuple[int, int]:
    """Bytes of the marks of lost updates, and most bytes allocated while they are made."""
    import torch

    from nxtrain.common.mesh import Mesh
    from nxtrain.common.sharding import Layout, ParamTable, ShardSpec
    from nxtrain.config.schema import OptimConfig
    from nxtrain.optim.adamw import AdamW
    from tests.support.adamw import precision

    shape = 16384, 8192
    layout = Layout(ParamTable({"w": ShardSpec(shape, decay=True)}), Mesh.build(1, 0))
    with opened_gpu() as backend:
        params = {"w": torch.empty(shape, dtype=torch.bfloat16, device="cuda")}
        types = precision(torch.bfloat16, "fp32_master")
        adamw = AdamW(params, layout, backend.kernels, backend.put, precision=types, seed=0, optim=OptimConfig())
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        ((_, marks),) = adamw.lost_updates(*backend.scalars(1e-3))
        return marks.nbytes, torch.cuda.max_memory_allocated() - before


def test_marks_of_lost_updates_take_little_more_than_themselves(gpu: SimulatedGpu) -> None:
    of_marks, most = gpu.run(memory_of_marks)
    assert of_marks < most < 1.75 * of_marks, "copies of a tile, and not of the parameter"


def finite_step(tables: Mapping[str, Mapping[str, Any]]) -> Record:
    """Record of a step whose update is not skipped.

    The update on the host reads from the device that the norm is finite. No kernel of a pretended GPU writes the
    answer, and memory that is used again may hold another.
    """
    import torch

    from nxtrain.train import step

    def answer(_: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        return torch.tensor(False).to(norm.device)

    with patch.object(step, "not_finite", answer):
        return step_alone(tables)


@pytest.mark.parametrize("update", ["fp32_master", "bf16_stochastic"])
def test_an_update_on_the_host_copies_gradients_and_parameters_at_once(gpu: SimulatedGpu, update: str) -> None:
    tables = {"parallel": {"offload": ("optimizer",)}, "precision": {"params": "bf16", "update": update}}
    record = gpu.run(finite_step, tables)
    assert all(int(copy.fields["bytes"]) <= 8 for copy in record.pageable_copies)  # rate, factor, and a skipped step
    assert len(record.host_waits) <= 8  # one of them for all gradients
    out, back = (record.copied_bytes[way] for way in (("device", "pinned"), ("pinned", "device")))
    assert out > 2**20 < back
