"""Put a model and its optimizer together for one rank."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from nxtrain.backends.base import Backend
from nxtrain.config.check import Resolved
from nxtrain.family import BuildContext
from nxtrain.mesh import Mesh
from nxtrain.nn.init import draw, materialize
from nxtrain.optim.adamw import AdamW
from nxtrain.parallel.grads import Gradients
from nxtrain.parallel.native import NativeLayers
from nxtrain.parallel.regions import TensorParallel
from nxtrain.sharding import ParamTable
from nxtrain.train.step import TrainState

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def dtype_name(plan: Resolved) -> str:
    """Torch's name of the parameters' type, such as `bfloat16`."""
    return str(DTYPES[plan.config.precision.params]).removeprefix("torch.")


def build_model(plan: Resolved, backend: Backend, mesh: Mesh, *, init: Literal["draw", "zeros"]) -> nn.Module:
    """Build this rank's part of the model and give it storage.

    Args:
        plan: What to build.
        backend: Where it lives.
        mesh: The axes of this rank.
        init: `draw` the first weights, or leave zeros for a load that follows.
    """
    model = build_meta(plan, backend, mesh)
    fill = draw(ParamTable.of(model), mesh.tp, plan.config.run.seed) if init == "draw" else None
    materialize(model, backend.put, fill)
    return model


def build_meta(plan: Resolved, backend: Backend, mesh: Mesh) -> nn.Module:
    """Build this rank's part of the model without storage."""
    run = plan.config
    dtype = DTYPES[run.precision.params]
    parallel = TensorParallel(mesh.tp, backend.collectives, dtype, run.parallel.sequence_parallel and mesh.tp.size > 1)
    context = BuildContext(
        layers=NativeLayers(parallel, loss_chunk_bytes=run.train.loss_chunk_mib << 20),
        kernels=backend.kernels,
        dtype=dtype,
        seq_len=run.train.seq_len,
        fused_qkv=run.model.fused_qkv,
        fused_gate_up=run.model.fused_gate_up,
        scaled_init=run.model.init == "scaled",
        decay_norms=run.optim.decay_norms,
    )
    return plan.family.build(plan.model, context)


def build_state(plan: Resolved, model: nn.Module, backend: Backend, mesh: Mesh) -> TrainState:
    """Give a model what training needs beside it; its weights must have their first values."""
    run = plan.config
    table = ParamTable.of(model)
    parameters = dict(model.named_parameters())
    update = run.precision.update
    assert update in ("fp32", "fp32_master"), update
    return TrainState(
        model=model,
        table=table,
        gradients=Gradients(
            parameters,
            table,
            mesh,
            backend.collectives,
            backend.put,
            dtype=DTYPES[run.precision.reduce],
            num_micro=run.train.global_batch // (run.train.micro_batch * mesh.dp.size),
        ),
        optimizer=AdamW(
            parameters,
            table,
            backend.kernels,
            backend.put,
            update=update,
            betas=run.optim.betas,
            eps=run.optim.eps,
            weight_decay=run.optim.weight_decay,
        ),
        backend=backend,
        mesh=mesh,
        clip=run.optim.clip,
    )
