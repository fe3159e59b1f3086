"""Updates and norms on a pretended GPU: few launches, and of a compiled update one for each parameter."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.cuda_sim import Record, SimulatedGpu, opened_gpu, recorded

NUM_BLOCKS = 8
NUM_PARAMS = 4 * NUM_BLOCKS
SLOW_RULES = [pytest.param(update, marks=pytest.mark.slow) for update in ("fp32_master", "bf16_kahan")]


def third_update(update: str, compiled: bool, changes: bool = False) -> tuple[Record, Record]:
    """Records of an update in its third step, after the pieces of a beta that changes, and of the gradients' norm."""
    import torch

    from nxtrain.common.mesh import Mesh
    from nxtrain.common.sharding import Layout, ParamTable, ShardSpec
    from nxtrain.config.schema import OptimConfig
    from nxtrain.optim.adamw import AdamW
    from nxtrain.parallel.grads import SquareSum
    from tests.support.adamw import precision

    torch._dynamo.reset()
    shapes: dict[str, tuple[int, ...]] = {}
    for block in range(NUM_BLOCKS):
        sizes = {"qkv": (96, 64), "o": (64, 64), "down": (64, 160), "norm": (64,)}
        shapes |= {f"{block}.{name}": shape for name, shape in sizes.items()}
    table = ParamTable({name: ShardSpec(shape, decay=len(shape) > 1) for name, shape in shapes.items()})
    layout = Layout(table, Mesh.build(1, 0))
    with opened_gpu() as backend:
        if compiled:
            backend.compile_kernels()
        bf16: Any = torch.bfloat16
        types = precision(bf16, update, bf16 if update == "bf16_stochastic" else torch.float32)  # type: ignore[arg-type]
        params, grads = ({n: torch.zeros(s, dtype=bf16, device="cuda") for n, s in shapes.items()} for _ in range(2))
        optim = OptimConfig()
        if changes:
            pieces = [{"steps": 2, "to": 0.5}]
            optim = OptimConfig.model_validate({"beta1_pieces": pieces, "weight_decay_schedule": "corrected"})
        adamw = AdamW(params, layout, backend.kernels, backend.put, precision=types, seed=0, optim=optim)
        norm = SquareSum(layout, params, backend.put, backend.kernels)
        lr, scale = backend.scalars(1e-3, 1.0)
        for _ in range(2):
            adamw.step(grads, lr, scale)
        with recorded() as of_update:
            adamw.step(grads, lr, scale)
        with recorded() as of_norm:
            norm.of(grads)
    return of_update, of_norm


@pytest.mark.parametrize("update", [*SLOW_RULES, "bf16_stochastic"])
def test_a_compiled_update_is_one_kernel_for_each_parameter(gpu: SimulatedGpu, update: str) -> None:
    record, _ = gpu.run(third_update, update, True)
    own = [name for name in record.kernels if name.startswith("triton")]
    assert len(own) == NUM_PARAMS
    assert len(record.kernels) - NUM_PARAMS <= 16  # count of the steps, and the hash of a step
    assert record.host_waits == [] and record.of("malloc") == []


@pytest.mark.slow
def test_a_beta_that_changes_is_part_of_the_compiled_update(gpu: SimulatedGpu) -> None:
    record, _ = gpu.run(third_update, "fp32_master", True, True)
    own = [name for name in record.kernels if name.startswith("triton")]
    assert len(own) == NUM_PARAMS
    assert record.host_waits == [] and record.of("malloc") == []


def test_numbers_that_change_need_no_wait_of_the_host(gpu: SimulatedGpu) -> None:
    record, _ = gpu.run(third_update, "fp32_master", False, True)
    assert record.host_waits == []


def test_a_norm_takes_few_launches_whatever_the_number_of_parameters(gpu: SimulatedGpu) -> None:
    _, record = gpu.run(third_update, "fp32_master", False)
    assert len(record.kernels) <= 10 and record.host_waits == []
