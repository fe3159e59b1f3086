"""Construction of the model, the optimizer and the training state on one rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Literal, cast

import torch
from torch import Tensor, nn

from nxtrain.backends.attention_choice import context_method, layout_of_ring
from nxtrain.backends.base import Backend
from nxtrain.checkpoint.convert.hf_folder import HfWeights
from nxtrain.checkpoint.convert.peft import AdapterWeights
from nxtrain.common.errors import ConfigError, Problem
from nxtrain.common.family import BuildContext, CausalLM
from nxtrain.common.kernels import Kernels
from nxtrain.common.mesh import Mesh
from nxtrain.common.sequence_cut import SequenceCut
from nxtrain.common.sharding import Layout, ParamTable
from nxtrain.common.stages import StagePart, split_layers, split_layers_at
from nxtrain.config.check import Resolved
from nxtrain.config.model_folder import whole_folder
from nxtrain.config.schema import FULLY_SHARDED, RunConfig, TrainConfig
from nxtrain.metrics.routers import NUM_OTHERS
from nxtrain.nn import quantized
from nxtrain.nn.balance import BatchRouterLosses
from nxtrain.nn.compiled import compile_model
from nxtrain.nn.dropout import Dropout
from nxtrain.nn.init import Fill, draw, materialize
from nxtrain.nn.lora import adapt, is_adapter
from nxtrain.nn.offload import offload_activations
from nxtrain.nn.remat import recompute_parts
from nxtrain.optim.adamw import AdamW
from nxtrain.optim.host_copies import HostCopies
from nxtrain.optim.loss_scale import LossScale
from nxtrain.optim.muon import Muon
from nxtrain.parallel.context_parallel import ContextParallel
from nxtrain.parallel.data_parallel import Bucketed, DataParallel, Reduction, Replicated, Zero1
from nxtrain.parallel.expert_parallel import ExpertParallel
from nxtrain.parallel.float8 import use_float8
from nxtrain.parallel.fully_sharded import FullySharded, Prefetch, Sharding
from nxtrain.parallel.grads import Gradients
from nxtrain.parallel.graph_sharding import GatheredInGraph, GraphSharding
from nxtrain.parallel.loss import VocabHead
from nxtrain.parallel.native import NativeLayers
from nxtrain.parallel.noise_scale import NoiseScale
from nxtrain.parallel.pipeline import Pipeline
from nxtrain.parallel.precision import Precision
from nxtrain.parallel.regions import TensorParallel
from nxtrain.parallel.weight_grads import WeightGradients
from nxtrain.parallel.whole_matrices import WholeMatrices, hidden_matrices
from nxtrain.train.health.step_history import StepHistory
from nxtrain.train.kto import OBJECTIVES
from nxtrain.train.step import TrainState


def mesh_of(plan: Resolved, backend: Backend) -> Mesh:
    """Build the mesh of a backend's ranks as configured, in the rank order that the backend's library requires.

    Raises:
        ConfigError: The degrees do not fit the number of ranks.
        BackendError: The library cannot set up the process groups of the mesh.
    """
    order = backend.binding.rank_order(tp=plan.config.parallel.tp, pp=plan.config.parallel.pp)
    mesh = build_mesh(plan, backend.world, backend.rank, backend.local_world, order)
    backend.lay_out(mesh)
    return mesh


def build_mesh(plan: Resolved, world: int, rank: int, ranks_per_node: int, order: tuple[int, ...] = ()) -> Mesh:
    """Build the mesh of a number of ranks as configured.

    Raises:
        ConfigError: The degrees do not fit the number of ranks.
    """
    parallel = plan.config.parallel
    shard_size = 0
    if parallel.shard == "none":
        shard_size = 1
    elif parallel.shard == "hybrid":
        shard_size = parallel.shard_size
        replicas_per_node, rest = divmod(ranks_per_node, parallel.tp)
        if not shard_size:  # the largest group of adjacent ranks that fits one node and divides those of dp x cp evenly
            shard_size = 1 if rest else math.gcd(world // (parallel.tp * parallel.pp), replicas_per_node)
    mesh = Mesh.build(
        world,
        rank,
        tp=parallel.tp,
        pp=parallel.pp,
        dp=parallel.dp,
        cp=parallel.cp,
        ep=parallel.ep,
        shard=shard_size,
        order=order,
    )
    if "params" in parallel.offload and mesh.shard_size == 1:
        reason = f"params need several ranks that shard them, but shard={parallel.shard} has one (dp={mesh.dp_size})"
        raise ConfigError([Problem("parallel.offload", reason, hint="remove params from it, or start more ranks")])
    return mesh


def build_model(plan: Resolved, backend: Backend, mesh: Mesh, *, init: Literal["draw", "hf", "zeros"]) -> nn.Module:
    """Build this rank's part of the model and fill it with initial values.

    Args:
        plan: Validated configuration.
        backend: Device of the model.
        mesh: The axes of this rank.
        init: `draw` draws initial weights. `hf` reads the weights of `model.hf`, and draws adapters. `zeros` leaves
            zeros for a checkpoint to replace.

    Raises:
        ConfigError: The Hugging Face folder does not fit the model.
        CheckpointError: Some weights of the Hugging Face folder are not finite.
    """
    model = build_meta(plan, backend, mesh)
    table = ParamTable.of(model)
    drawn: Fill = draw(table, mesh.tp, plan.config.run.seed)
    fill: Fill | None = None
    weights: HfWeights | None = None
    if init == "draw":
        fill = drawn
    if init == "hf":
        given = weights = HfWeights(whole_folder(plan.config.model.hf), table, mesh.tp, whole_shapes(plan, backend))
        adapters, finetune = drawn, plan.config.finetune
        if finetune.adapter:  # another run's
            wanted, base = _adapter_shapes(plan, backend), whole_folder(plan.config.model.hf)
            adapters = AdapterWeights(Path(finetune.adapter), finetune, table, mesh.tp, wanted, base)

        def fill_whole(name: str, local: Tensor) -> None:
            if is_adapter(name):
                adapters(name, local)
            else:
                given(name, local)

        fill = quantized.filling(model, weights.whole, fill_whole)
    fill_model(plan, model, backend, mesh, fill)
    if weights is not None:
        weights.check()
    return model


def fill_model(plan: Resolved, model: nn.Module, backend: Backend, mesh: Mesh, fill: Fill | None) -> None:
    """Allocate and fill the storage of a model on the meta device, sharded over data parallel ranks if configured."""
    if not is_fully_sharded(plan, mesh):
        materialize(model, backend.put, fill)
        backend.binding.mark(model, mesh.tp)
        return
    parallel, precision = plan.config.parallel, Precision.of(plan.config.precision)

    def stored(parameter: nn.Parameter) -> torch.dtype:
        return precision.sharded_params if parameter.requires_grad else parameter.dtype

    def fill_module(module: nn.Module) -> None:
        materialize(model, backend.put, fill, within=module, stored=stored)

    if plan.config.compile.torch_compile == "step":
        keep_gathered = parallel.shard == "grad_op"
        GraphSharding(mesh.dense, backend.collectives, precision, keep_gathered).apply(model, fill_module)
        return
    sharding = Sharding(
        backend.device_mesh(mesh.dense),
        keep_gathered=parallel.shard == "grad_op",
        prefetch=Prefetch(parallel.prefetch, parallel.forward_prefetch, parallel.backward_prefetch),
        offload="params" in parallel.offload,
        precision=precision,
        unit_params=parallel.unit_params,
        chunks=[len(part.blocks) for part in parts_of(plan, mesh)],
        expert_mesh=backend.device_mesh(mesh.experts) if mesh.ep_size > 1 else None,
    )
    sharding.apply(model, fill_module)


def is_fully_sharded(plan: Resolved, mesh: Mesh) -> bool:
    """True if the parameters are sharded over the data parallel ranks (full sharding)."""
    return plan.config.parallel.shard in FULLY_SHARDED and mesh.shard_size > 1


def build_meta(plan: Resolved, backend: Backend, mesh: Mesh) -> nn.Module:
    """Build this rank's part of the model on the meta device, without storage."""
    run = plan.config
    dtype = Precision.of(run.precision).params
    if run.compile.torch_compile:
        backend.compile_kernels()
    if run.parallel.async_tp:
        backend.overlap_products(mesh.tp)
    parallel = TensorParallel(
        mesh.tp,
        backend.collectives,
        backend.kernels,
        dtype,
        sequence_parallel=run.parallel.sequence_parallel and mesh.tp.size > 1,
    )
    native = NativeLayers(
        parallel,
        loss_chunk_bytes=run.train.logits_mib(backend.name) << 20,
        token_losses=run.finetune.compares,
        expert_parallel=ExpertParallel(mesh.ep, backend.collectives) if mesh.ep_size > 1 else None,
    )
    context_parallel = context_parallel_of(plan, backend, mesh)
    context = BuildContext(
        layers=backend.binding.layers(native, mesh, dtype),
        kernels=backend.kernels,
        dtype=dtype,
        seq_len=run.train.seq_len,
        fused_qkv=run.model.fused_qkv,
        fused_gate_up=run.model.fused_gate_up,
        scaled_init=run.model.init == "scaled",
        decay_norms=run.optim.decay_norms,
        parts=parts_of(plan, mesh),
        context_parallel=context_parallel,
        router_losses=_router_losses(plan, backend, mesh),
        moe_capacity_factor=run.model.moe_capacity_factor if run.model.moe_dispatch == "capacity" else None,
    )
    model = plan.family.build(plan.model, context)
    cast(CausalLM, model).context_parallel = context_parallel
    if run.finetune.method == "qlora":
        quantized.quantize(model, parallel)
    recompute = backend.kernels.recompute
    if run.finetune.adapts:
        dropout = None
        if run.finetune.dropout:
            positions = torch.arange(run.train.seq_len)
            if context_parallel is not None:
                positions = context_parallel.positions
            dropout = Dropout(run, mesh.dp, positions, backend.put)
        if mesh.pp_size > 1:
            _adapter_shapes(plan, backend)  # refuses targets that no stage has
        adapt(model, run.finetune, parallel, dropout, is_whole=mesh.pp_size == 1)
        if dropout is not None:
            dropout.attach(model, [len(part.blocks) for part in parts_of(plan, mesh)])
            recompute = dropout.recomputing(recompute)
    use_float8(model, run.precision.fp8)
    recompute_parts(model, run.train.remat, run.train.seq_len, recompute)
    if "activations" in run.parallel.offload:
        offload_activations(model)
    if run.compile.torch_compile:
        compile_model(model, backend, whole=run.compile.torch_compile == "step")
    return model


def _router_losses(plan: Resolved, backend: Backend, mesh: Mesh) -> BatchRouterLosses | None:
    """Router losses over the ranks of dp x cp, and over tp if tp ranks have different tokens; None without experts."""
    mixture, run = plan.dimensions.mixture, plan.config
    if mixture is None or run.finetune.compares:
        return None
    axis, num_same = mesh.dp_cp, 1
    if run.parallel.sequence_parallel:
        axis, num_same = mesh.stage, mesh.tp_size
    return BatchRouterLosses(mixture.aux_loss_coef, run.model.moe_z_loss, backend.collectives, axis, num_same)


def context_parallel_of(plan: Resolved, backend: Backend, mesh: Mesh) -> ContextParallel | None:
    """Context parallel attention of a run; None if each rank has whole sequences."""
    parallel = plan.config.parallel
    if mesh.cp_size == 1:
        return None
    method = context_method(parallel.cp_method, backend.name)
    layout = parallel.cp_layout if backend.ring is None else layout_of_ring(parallel.cp_layout)
    cut = SequenceCut.of(plan.config.train.seq_len, mesh.cp_size, layout)
    return ContextParallel(mesh.cp, cut, method, backend.collectives, backend.kernels, backend.ring)


def whole_shapes(plan: Resolved, backend: Backend) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor of the unsharded model, without adapters, by its name in checkpoints."""
    model, _ = _build_whole(plan, backend)
    return ParamTable.of(model).global_shapes()


def _adapter_shapes(plan: Resolved, backend: Backend) -> dict[str, tuple[int, ...]]:
    """Shape of each adapter matrix of the unsharded model, by its name in checkpoints."""
    model, parallel = _build_whole(plan, backend)
    adapt(model, plan.config.finetune, parallel)
    return ParamTable.of(model).of_trained(model).global_shapes()


def _build_whole(plan: Resolved, backend: Backend) -> tuple[nn.Module, TensorParallel]:
    """Build the unsharded model on the meta device, as a single rank would have it."""
    dtype = Precision.of(plan.config.precision).params
    alone = TensorParallel(Mesh(1, 0).tp, backend.collectives, backend.kernels, dtype)
    context = BuildContext(NativeLayers(alone), backend.kernels, dtype, plan.config.train.seq_len)
    return plan.family.build(plan.model, context), alone


def parts_of(plan: Resolved, mesh: Mesh) -> tuple[StagePart, ...]:
    """Parts of the model that a pipeline rank computes, one `StagePart` for each chunk."""
    parallel, num_blocks = plan.config.parallel, plan.model.num_hidden_layers
    if parallel.pipeline_cuts:
        parts = split_layers_at(num_blocks, parallel.pipeline_cuts)
    else:
        costs = plan.dimensions.layer_costs(plan.config.train.seq_len)
        parts = split_layers(num_blocks, mesh.pp_size * parallel.virtual_pp, costs)
    return parts[mesh.pp.rank :: mesh.pp_size]


def build_state(plan: Resolved, model: nn.Module, backend: Backend, mesh: Mesh) -> TrainState:
    """Build gradients, optimizer and pipeline around a model that is filled with its initial values."""
    run = plan.config
    precision = Precision.of(run.precision)
    layout = Layout(ParamTable.of(model).of_trained(model), mesh)
    num_params = plan.dimensions.num_params
    if run.finetune.adapts:
        num_params = sum(math.prod(shape) for shape in _adapter_shapes(plan, backend).values())
    data_parallel = _data_parallel(plan, model, layout, backend, precision)
    kernels, put = _storage(backend, on_host="params" in run.parallel.offload)
    mixture = plan.dimensions.mixture
    preferences = None
    num_sums, loads = 2, None
    if run.finetune.compares:
        on_answers = OBJECTIVES[run.finetune.objective]
        preferences = on_answers(run.finetune, mesh.cp, backend.collectives, backend.put)
        num_sums = len(preferences.sums)
    elif mixture is not None:
        num_sums = 4
        loads = backend.put(torch.zeros(plan.model.num_hidden_layers, mixture.num_experts + NUM_OTHERS))
        cast(CausalLM, model).count_loads(loads)
    loss_scale = None
    if precision.params == torch.float16:
        loss_scale = _loss_scale(plan, model, backend)
    return TrainState(
        model=model,
        data_parallel=data_parallel,
        gradients=Gradients(data_parallel, backend.collectives, put, kernels),
        optimizer=_optimizer(plan, model, data_parallel, backend, precision),
        pipeline=_pipeline(plan, model, backend, mesh, precision),
        num_params=num_params,
        backend=backend,
        precision=precision,
        clip=run.optim.clip,
        sums=backend.put(torch.zeros(num_sums)),
        history=StepHistory(backend.put, backend.kernels.fuse),
        loss_scale=loss_scale,
        noise=_noise_scale(run, data_parallel, backend),
        z_sum=_z_sum(run.train, model, backend),
        accumulates=_accumulates(run.train, mesh),
        context_parallel=cast(CausalLM, model).context_parallel,
        preferences=preferences,
        loads=loads,
        sequence_parallel=run.parallel.sequence_parallel and mesh.tp_size > 1,
        has_padding=loads is not None and run.data.packing == "best_fit",
    )


def _optimizer(
    plan: Resolved, model: nn.Module, data_parallel: DataParallel, backend: Backend, precision: Precision
) -> AdamW:
    run, layout = plan.config, data_parallel.layout
    offload = run.parallel.offload
    kernels, put = _storage(backend, on_host="optimizer" in offload)
    apart = ("params" in offload) != ("optimizer" in offload)
    shards, seed = data_parallel.shards, run.run.seed
    if run.optim.name == "adamw":
        copies: HostCopies | None = None
        if apart and "optimizer" in offload and backend.is_asynchronous:
            copies, apart = HostCopies(shards, backend.pin), False
        given = shards, layout, kernels, put
        return AdamW(*given, precision=precision, seed=seed, optim=run.optim, apart=apart, host_copies=copies)
    hidden = hidden_matrices(model, layout.table)
    num_blocks = -(-plan.model.num_hidden_layers // layout.mesh.pp_size)
    matrices = WholeMatrices(hidden, layout.mesh, num_blocks, backend.collectives, backend.put)
    return Muon(shards, layout, kernels, put, matrices, precision=precision, seed=seed, optim=run.optim, apart=apart)


def _noise_scale(run: RunConfig, data_parallel: DataParallel, backend: Backend) -> NoiseScale | None:
    """Meter of the gradient noise scale, which reads gradients before they are averaged; None if not configured."""
    if not run.metrics.noise_scale:
        return None
    assert isinstance(data_parallel, Bucketed), "config/check.py refuses other modes"
    noise = NoiseScale(data_parallel.layout, backend.collectives, backend.put, backend.kernels, run.train.seq_len)
    data_parallel.on_local = noise.note
    return noise


def _z_sum(train: TrainConfig, model: nn.Module, backend: Backend) -> Tensor | None:
    """Tensor to which the loss adds its z-loss terms; None without z-loss."""
    if not train.z_loss:
        return None
    z_sum = backend.put(torch.zeros(1))
    for module in model.modules():
        if isinstance(module, VocabHead):
            module.z_loss, module.z_sum = train.z_loss, z_sum
    return z_sum


def _accumulates(train: TrainConfig, mesh: Mesh) -> bool:
    """True if any step of the run has several micro-batches."""
    return max(train.batch_sizes().all) > train.micro_batch * mesh.dp.size


def _loss_scale(plan: Resolved, model: nn.Module, backend: Backend) -> LossScale:
    """Loss scale of fp16 gradients, connected to the model's loss."""
    precision, train = plan.config.precision, plan.config.train
    scale = LossScale(backend.put, precision.loss_scale, precision.loss_scale_every, train.micro_batch * train.seq_len)
    for module in model.modules():
        if isinstance(module, VocabHead):
            module.scale = scale.per_position
    return scale


def _data_parallel(
    plan: Resolved, model: nn.Module, layout: Layout, backend: Backend, precision: Precision
) -> DataParallel:
    run = plan.config
    if is_fully_sharded(plan, layout.mesh):
        if run.compile.torch_compile == "step":
            return GatheredInGraph(model, layout, backend.collectives, precision)
        return FullySharded(model, layout)
    how = Reduction(
        precision=precision,
        accumulates=_accumulates(run.train, layout.mesh),
        bucket_bytes=run.parallel.bucket_mib << 20,
    )
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if run.parallel.shard == "zero1":
        return Zero1(parameters, layout, backend.collectives, how, backend.put)
    return Replicated(parameters, layout, backend.collectives, how, backend.put, backend.binding)


def _pipeline(plan: Resolved, model: nn.Module, backend: Backend, mesh: Mesh, precision: Precision) -> Pipeline | None:
    if mesh.pp_size == 1:
        return None
    run = plan.config
    num_rows = run.train.seq_len // mesh.cp_size
    if run.parallel.sequence_parallel:
        num_rows = num_rows // mesh.tp_size
    blanks = [torch.zeros(num_rows, run.train.micro_batch, plan.model.hidden_size, dtype=precision.params)]
    mixture = plan.dimensions.mixture
    if mixture is not None:
        blanks.append(torch.zeros(2 * mixture.num_experts + 4))
    return Pipeline(
        cast(CausalLM, model),
        parts_of(plan, mesh),
        mesh,
        backend.collectives,
        backend.step_boundary,
        [backend.put(blank) for blank in blanks],
        WeightGradients(model) if run.parallel.schedule == "zero_bubble" else None,
    )


def _storage(backend: Backend, *, on_host: bool) -> tuple[Kernels, Callable[[Tensor], Tensor]]:
    """Kernels of the host or of the device, and a function that copies host tensors to the same memory."""
    if on_host:
        return backend.host_kernels, lambda host: host
    return backend.kernels, backend.put
