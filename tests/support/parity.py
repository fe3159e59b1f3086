"""The reference run, transformers with torch's AdamW in one process, and ours on one rank of any layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import _muon as torch_muon

from nxtrain.backends.base import Backend, Binding
from nxtrain.backends.torch_kernels import PlainKernels
from nxtrain.common.distributed.c10d_collectives import C10dCollectives
from nxtrain.common.mesh import Mesh
from nxtrain.common.sharding import Layout, ParamTable
from nxtrain.common.vocab import IGNORE_INDEX, true_targets
from nxtrain.config.check import Resolved
from nxtrain.optim.adamw import AdamW
from nxtrain.train.build import build_mesh, build_meta, build_state, mesh_of
from nxtrain.train.device_batch import DeviceBatch
from nxtrain.train.step import TrainState, train_step
from tests.support.adamw import wide_newton_schulz
from tests.support.drawn import entropy_sum
from tests.support.drawn_schedules import follow_by_hand
from tests.support.models import hf_model, hf_tensors, our_model, plan, tokens

LR = 3e-3
OPTIM: dict[str, Any] = {"lr": LR, "weight_decay": 0.1, "clip": 0.5, "eps": 1e-5, "betas": (0.9, 0.95)}
GLOBAL_BATCH = 4


@dataclass(frozen=True)
class Course:
    """Losses, norms and weights of a run."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def batches(resolved: Resolved, steps: int) -> list[Tensor]:
    """The global batch of each step: (global_batch, seq_len + 1)."""
    return [tokens(resolved, resolved.config.train.global_batch, seed=100 + step) for step in range(steps)]


Pairs = Sequence[tuple[Tensor, Tensor]]
"""Inputs and targets of each step's global batch: (global_batch, seq_len) each."""


def _pairs(resolved: Resolved, steps: int) -> Pairs:
    return [(batch[:, :-1], batch[:, 1:]) for batch in batches(resolved, steps)]


def reference(
    resolved: Resolved,
    steps: int,
    data: Pairs | None = None,
    weights: Mapping[str, Tensor] | None = None,
    wrap: Callable[[torch.nn.Module], torch.nn.Module] = lambda model: model,
    loss_of: Callable[[torch.nn.Module, int], Tensor] | None = None,
) -> Course:
    """Train transformers' model in float64 on the whole batches; batches and weights are random unless given.

    `wrap` may freeze and replace parts of the model. `loss_of` gives the loss of a step in place of cross entropy.

    In float32, rounding of the reference itself would count: on a CPU with AVX2 alone, 20 steps are off by 1.3e-5 of a
    norm.
    """
    # Eager attention rounds its softmax to float32, and takes twice the time of the fused one, which does not.
    attention = "eager" if resolved.dimensions.sinks else "sdpa"
    wrapped = wrap(hf_model(resolved, weights=weights, attention=attention).double())
    optim = resolved.config.optim
    trained = {name: p for name, p in wrapped.named_parameters() if p.requires_grad}
    optimizers = _optimizers(trained, resolved)
    losses, norms = [], []
    batches_ = [] if loss_of else data or _pairs(resolved, steps)

    def backward(model: torch.nn.Module, step: int) -> Tensor:
        if loss_of is not None:
            loss = loss_of(model, step)
        elif resolved.dimensions.mixture is not None:
            return _backward_of_mixture(model, resolved, *batches_[step])
        else:
            inputs, targets = batches_[step]
            logits = model(input_ids=inputs).logits.double()
            counted = logits[true_targets(targets) != IGNORE_INDEX]
            loss = entropy_sum(logits, targets) / len(counted)
            z_loss = resolved.config.train.z_loss * counted.logsumexp(-1).square().mean()
            (loss + z_loss).backward()
            return loss
        loss.backward()
        return loss

    for step in range(steps):
        wrapped.zero_grad()
        loss = backward(wrapped, step)
        squares = [p.grad.double().square().sum() for p in trained.values() if p.grad is not None]
        norm = torch.stack(squares).sum().sqrt()
        if optim.clip:
            torch.nn.utils.clip_grads_with_norm_(trained.values(), optim.clip, norm)
        norms.append(norm.item())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch_muon, "_zeropower_via_newtonschulz", wide_newton_schulz())
            for optimizer in optimizers:
                optimizer.step()
        losses.append(loss.item())
    weights_by_name = hf_tensors(resolved.dimensions, trained.items())
    return Course(losses, norms, {name: p.detach() for name, p in weights_by_name.items()})


def _backward_of_mixture(model: torch.nn.Module, resolved: Resolved, inputs: Tensor, targets: Tensor) -> Tensor:
    """Backward of a model with experts, micro-step by micro-step; returns the mean cross entropy.

    A micro-step has a micro-batch of each data parallel rank. The losses of its routers are those of all its tokens,
    and weigh as many as its targets that count.
    """
    config, dp = resolved.config, max(1, resolved.config.parallel.dp)
    count = (true_targets(targets) != IGNORE_INDEX).sum()
    total = torch.zeros((), dtype=torch.float64)
    rows = torch.arange(len(inputs)).view(dp, -1, config.train.micro_batch)
    mixture = resolved.dimensions.mixture
    assert mixture is not None
    for micro in rows.unbind(1):
        own = micro.flatten()
        result = model(input_ids=inputs[own], output_router_logits=True)
        loss = entropy_sum(result.logits.double(), targets[own])
        squares = torch.cat(result.router_logits).double().logsumexp(-1).square().mean()
        others = mixture.aux_loss_coef * result.aux_loss + config.model.moe_z_loss * squares
        ((loss + others * (true_targets(targets[own]) != IGNORE_INDEX).sum()) / count).backward()
        total += loss.detach()
    return total / count


def _optimizers(trained: Mapping[str, torch.nn.Parameter], resolved: Resolved) -> list[torch.optim.Optimizer]:
    """AdamW for all parameters, or torch's Muon for the matrices of the blocks and AdamW for all others."""
    optim = resolved.config.optim
    inner: dict[str, torch.nn.Parameter] = {}
    if optim.name == "muon":
        inner = {name: p for name, p in trained.items() if ".layers." in name and p.dim() > 1}
    hidden = {id(p) for p in inner.values()}
    groups = []
    for decays in (True, False):
        own = [
            p for name, p in trained.items() if id(p) not in hidden and _decays(name, p, optim.decay_norms) == decays
        ]
        groups.append({"params": own, "decays": decays})
    rate = optim.lr if optim.name == "adamw" else optim.adam_lr or optim.lr
    adamw = torch.optim.AdamW(groups, lr=rate, betas=optim.betas, eps=optim.eps)
    follow_by_hand(adamw, optim, rate)
    if not inner:
        return [adamw]
    rule: dict[str, Any] = {"momentum": optim.muon_momentum, "nesterov": optim.muon_nesterov}
    scale = {"original": "original", "moonlight": "match_rms_adamw"}[optim.muon_scale]
    rule |= {"ns_steps": optim.muon_steps, "adjust_lr_fn": scale}
    # Stacked experts are matrices of their own, which share their memory with the stack.
    views = hf_tensors(resolved.dimensions, ((name, p.detach()) for name, p in inner.items()))
    matrices = {name: torch.nn.Parameter(view) for name, view in views.items()}
    muon = torch.optim.Muon(matrices.values(), lr=optim.lr, **rule)
    follow_by_hand(muon, optim, optim.lr)

    def take_gradients(*_: object) -> None:
        grads = ((name, torch.zeros_like(p) if p.grad is None else p.grad) for name, p in inner.items())
        for name, grad in hf_tensors(resolved.dimensions, grads).items():
            matrices[name].grad = grad

    muon.register_step_pre_hook(take_gradients)
    return [adamw, muon]


def _decays(name: str, parameter: Tensor, norms: bool) -> bool:
    """Weight decay applies to matrices, to norms where the run says so, and never to biases."""
    if name.endswith("bias"):
        return False
    return parameter.dim() > 1 or (norms and not name.endswith(".sinks"))


def narrow_reference(resolved: Resolved, steps: int, *, masters: bool) -> Course:
    """Train transformers' model in bfloat16, with updates in float32 of what was rounded to nearest or of masters."""
    model = hf_model(resolved).to(torch.bfloat16)
    narrow = list(model.parameters())
    wide = [torch.nn.Parameter(p.detach().float()) for p in narrow]
    groups = [
        {
            "params": [p for p in wide if (p.dim() > 1) == decays],
            "weight_decay": resolved.config.optim.weight_decay * decays,
        }
        for decays in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=resolved.config.optim.lr, betas=OPTIM["betas"], eps=OPTIM["eps"])
    losses, norms = [], []
    for batch in batches(resolved, steps):
        model.zero_grad()
        logits = model(input_ids=batch[:, :-1]).logits.float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        for p, kept in zip(narrow, wide, strict=True):
            assert p.grad is not None
            kept.grad = p.grad.float()
        norms.append(torch.nn.utils.clip_grad_norm_(wide, OPTIM["clip"]).item())
        optimizer.step()
        with torch.no_grad():
            for p, kept in zip(narrow, wide, strict=True):
                p.copy_(kept)
                if not masters:
                    kept.copy_(p)
        losses.append(loss.item())
    return Course(losses, norms, {name: p.detach() for name, p in model.named_parameters()})


def start(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor]) -> TrainState:
    """Our state at step 0 with given whole weights."""
    mesh = mesh_of(resolved, backend)
    model = our_model(resolved, backend, mesh, weights)
    return build_state(resolved, model, backend, mesh)


def local_batch(state: TrainState, batch: Tensor, micro_batch: int) -> DeviceBatch:
    """This rank's part of a global batch, (global_batch, seq_len + 1)."""
    return local_pair(state, (batch[:, :-1], batch[:, 1:]), micro_batch)


def local_pair(state: TrainState, pair: tuple[Tensor, Tensor], micro_batch: int) -> DeviceBatch:
    """This rank's part of a global batch, given as inputs and targets."""
    dp = state.mesh.dp
    inputs, targets = (x.chunk(dp.size)[dp.rank].unflatten(0, (-1, micro_batch)) for x in pair)
    return DeviceBatch.of(inputs, targets, state.backend.put, context_parallel=state.context_parallel)


def run_ours(
    backend: Backend, resolved: Resolved, steps: int, weights: Mapping[str, Tensor], data: Pairs | None = None
) -> Course:
    """Train our model on this rank, from whole weights; the course holds this rank's shards."""
    return course_of(start(backend, resolved, weights), resolved, data or _pairs(resolved, steps))


def course_of(state: TrainState, resolved: Resolved, data: Pairs) -> Course:
    """Train our model on this rank from its state."""
    backend = state.backend
    losses, norms = [], []
    for pair in data:
        result = train_step(state, local_pair(state, pair, resolved.config.train.micro_batch), resolved.config.optim.lr)
        read = backend.fetch({"loss": result.loss, "norm": result.grad_norm})
        losses.append(read["loss"])
        norms.append(read["norm"])
    return Course(losses, norms, {name: p.detach().cpu() for name, p in state.data_parallel.shards.items()})


def max_weight_error(course: Course, expected: Course, resolved: Resolved, mesh: Mesh) -> float:
    """Largest difference between a rank's shards and the same part of the expected whole weights."""
    worst = 0.0
    layout = Layout(table_of(resolved, mesh), mesh)
    for name, blocks in layout.items():
        for block in blocks:
            part = expected.weights[layout.table[name].global_name(name, block.segment)].float()
            for dim, (offset, size) in enumerate(zip(block.offsets, block.sizes, strict=True)):
                part = part.narrow(dim, offset, size)
            worst = max(worst, (block.of(course.weights[name].float()) - part).abs().max().item())
    return worst


def check_course(courses: Sequence[Course], want: Course, resolved: Resolved) -> None:
    """Hold what every rank went through against the reference, whose gradients must have been clipped."""
    assert median(want.norms) > OPTIM["clip"], "clipping must be active"
    for rank, course in enumerate(courses):
        check_scalars(course.losses, course.norms, want)
        mesh = build_mesh(resolved, len(courses), rank, len(courses))
        assert max_weight_error(course, want, resolved, mesh) < 2e-5


def check_scalars(losses: Sequence[float], norms: Sequence[float], want: Course) -> None:
    """Hold the losses and gradient norms of a run in float32 against the reference."""
    assert losses == pytest.approx(want.losses, rel=0, abs=2e-6)
    assert norms == pytest.approx(want.norms, rel=1e-5)


@dataclass(frozen=True)
class Gradient:
    """Values of one step before its update."""

    loss: float
    norm: float
    num_tokens: float
    scale: float
    shards: dict[str, Tensor]


def gradient(state: TrainState, batch: DeviceBatch) -> Gradient:
    """Take one step that updates nothing."""
    keeper = _Keeper()
    result = train_step(replace(state, optimizer=keeper), batch, LR)
    scalars = {"loss": result.loss, "norm": result.grad_norm, "num_tokens": result.num_tokens, "scale": keeper.scale}
    read = state.backend.fetch(scalars)
    per_token = state.mesh.dp_cp.size / read["num_tokens"]
    read["scale"] /= per_token
    return Gradient(**read, shards={name: grad * per_token for name, grad in keeper.grads.items()})


class _Keeper(AdamW):
    """Keeps the gradients that an update would be made of."""

    def __init__(self) -> None:
        self.grads: dict[str, Tensor] = {}
        self.scale = torch.ones(())

    def step(self, grads: Mapping[str, Tensor], lr: Tensor, grad_scale: Tensor, skip: Tensor | None = None) -> None:
        self.grads = {name: grad.detach().cpu().clone() for name, grad in grads.items()}
        self.scale = grad_scale


def rank_gradient(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor]) -> Gradient:
    """The gradient of one global batch on this rank."""
    state = start(backend, resolved, weights)
    (batch,) = batches(resolved, 1)
    return gradient(state, local_batch(state, batch, resolved.config.train.micro_batch))


def whole(shards: Sequence[Mapping[str, Tensor]], resolved: Resolved) -> dict[str, Tensor]:
    """Put together what the ranks hold, by global name; copies come from the first rank that has them."""
    tensors: dict[str, Tensor] = {}
    for rank in reversed(range(len(shards))):
        mesh = build_mesh(resolved, len(shards), rank, len(shards))
        layout = Layout(table_of(resolved, mesh), mesh)
        for name, blocks in layout.items():
            spec = layout.table[name]
            for block in blocks:
                part = block.of(shards[rank][name])
                key = spec.global_name(name, block.segment)
                into = tensors.setdefault(key, part.new_zeros(spec.global_shape(block.segment)))
                for dim, (offset, size) in enumerate(zip(block.offsets, block.sizes, strict=True)):
                    into = into.narrow(dim, offset, size)
                into.copy_(part)
    return tensors


def relative_errors(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """|found - expected| / |expected| of each tensor, in the L2 norm."""
    assert actual.keys() == expected.keys()
    pairs = {name: (actual[name].double(), expected[name].double()) for name in expected}
    return {name: ((a - b).norm() / b.norm()).item() for name, (a, b) in pairs.items()}


def table_of(resolved: Resolved, mesh: Mesh) -> ParamTable:
    """Sharding of a model's trained parameters by a layout; needs no process group, since nothing is computed."""
    model = build_meta(resolved, _NoBackend(), mesh)  # type: ignore[arg-type]
    return ParamTable.of(model).of_trained(model)


class _NoBackend:
    name = "cpu"
    collectives = C10dCollectives(1)
    kernels = PlainKernels()
    ring = None
    binding = Binding()

    @staticmethod
    def put(x: Tensor) -> Tensor:
        return x


def layout(
    shape: str,
    *,
    tp: int,
    dp: int = 1,
    pp: int = 1,
    virtual_pp: int = 1,
    schedule: str = "1f1b",
    cuts: Sequence[int] = (),
    sp: bool = False,
    batch: int = GLOBAL_BATCH,
    micro: int = 4,
    params: str = "fp32",
    update: str = "",
    shard: str = "none",
    shard_size: int = 0,
    remat: str = "none",
    cp: int = 1,
    cp_layout: str = "auto",
    cp_method: str = "auto",
    ep: int = 1,
    seq_len: int = 0,
    **model: Any,
) -> Resolved:
    """A resolved configuration of the parity runs."""
    update = update or ("fp32" if params == "fp32" else "fp32_master")
    stages = {"pp": pp, "virtual_pp": virtual_pp, "schedule": schedule, "pipeline_cuts": tuple(cuts)}
    context = {"cp": cp, "cp_layout": cp_layout, "cp_method": cp_method, "ep": ep}
    sharding = {"shard": shard, "shard_size": shard_size}
    length = {"seq_len": seq_len} if seq_len else {}
    return plan(
        shape,
        parallel={
            "tp": tp,
            "dp": dp,
            **stages,
            **context,
            "sequence_parallel": sp,
            **sharding,
        },
        train={"global_batch": batch, "micro_batch": micro, "loss_chunk_mib": 1, "remat": remat, **length},
        precision={"params": params, "update": update},
        optim=OPTIM,
        model=model,
    )
