"""One training step or evaluation step on the device: forward, backward, gradient reduction and optimizer update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from nxtrain.backends.base import Backend
from nxtrain.common.distributed.agreement import Ranks
from nxtrain.common.family import CausalLM
from nxtrain.common.layers import ContextAttention
from nxtrain.common.mesh import Mesh
from nxtrain.common.sharding import Layout, ParamTable
from nxtrain.common.vocab import IGNORE_INDEX, true_targets
from nxtrain.metrics.run_observer import RunObserver, Section
from nxtrain.nn.lora import without_adapters
from nxtrain.optim.adamw import AdamW
from nxtrain.optim.loss_scale import LossScale
from nxtrain.parallel.data_parallel import DataParallel
from nxtrain.parallel.grads import Gradients, clip_factor
from nxtrain.parallel.noise_scale import NoiseScale
from nxtrain.parallel.pipeline import Pipeline
from nxtrain.parallel.precision import Precision
from nxtrain.parallel.schedule import Action
from nxtrain.train.device_batch import DeviceBatch
from nxtrain.train.health.step_history import StepHistory, not_finite
from nxtrain.train.kto import Kto
from nxtrain.train.preferences import Pairs, Preferences

_SECTIONS: dict[str, Section] = {"forward": "forward", "backward": "backward", "weight": "backward"}
"""Section of a step for each kind of pipeline action; a transfer belongs to the section before it."""


@dataclass(frozen=True)
class TrainState:
    """Training state that a step reads and updates: model, gradients, optimizer, device and running sums.

    Args:
        model: The model, built and filled.
        data_parallel: Data parallel strategy, with the shards that this rank updates.
        gradients: Reduction and norm of the gradients.
        optimizer: Update rule with its state.
        pipeline: Pipeline stage of this rank; None without pipeline parallelism.
        num_params: Number of trained parameters of the whole model.
        backend: Device and collectives.
        precision: Types of parameters, gradients and optimizer state.
        clip: Largest global gradient norm; 0 for no clipping.
        sums: (2,) float32 on the device, loss and tokens of the micro-batches since the last update. With experts (4,),
            including the routers' losses. With an objective on answers, the sums of `Preferences.sums`.
        history: Losses and gradient norms of the last steps.
        section: Called when a section of a step begins.
        loss_scale: Loss scale of fp16 gradients; None for other types.
        noise: Meter of the gradient noise scale; None if it is not measured.
        z_sum: (1,) float32 on the device, terms of the z-loss since the last update; None without z-loss.
        accumulates: Some steps of the run have several micro-batches, so that each micro-batch is a separate graph.
        context_parallel: Ranks that share the positions of each sequence; None if this rank has all positions.
        preferences: Objective on answers; None for the cross entropy of tokens.
        loads: Loads of the experts in the forward passes since the last update, as in `CausalLM.count_loads`; None
            without experts.
        sequence_parallel: Ranks of tp have different tokens between layers, so that expert loads are also summed over
            tp.
        has_padding: Rows may have padding, which the routers' losses exclude.
    """

    model: nn.Module
    data_parallel: DataParallel
    gradients: Gradients
    optimizer: AdamW
    pipeline: Pipeline | None
    num_params: int
    backend: Backend
    precision: Precision
    clip: float
    sums: Tensor
    history: StepHistory
    section: Callable[[Section], None] = RunObserver().section
    loss_scale: LossScale | None = None
    noise: NoiseScale | None = None
    z_sum: Tensor | None = None
    accumulates: bool = False
    context_parallel: ContextAttention | None = None
    preferences: Preferences | None = None
    loads: Tensor | None = None
    sequence_parallel: bool = False
    has_padding: bool = False

    def reporting(self, section: Callable[[Section], None]) -> TrainState:
        """Copy of the state whose steps report their sections to a callback."""

        def watch(action: Action) -> AbstractContextManager[None]:
            if action.kind in _SECTIONS:
                section(_SECTIONS[action.kind])
            return nullcontext()

        if self.pipeline is not None:
            self.pipeline.watch = watch
        return replace(self, section=section)

    @property
    def layout(self) -> Layout:
        """Layout of the parameter entries that this rank updates."""
        return self.data_parallel.layout

    @property
    def table(self) -> ParamTable:
        """Sharding over tp of the parameters of this rank's stage."""
        return self.layout.table

    @property
    def mesh(self) -> Mesh:
        """The axes of this rank."""
        return self.layout.mesh

    @property
    def ranks(self) -> Ranks:
        """All ranks of the run, over the backend's host group."""
        return Ranks(self.mesh, self.backend.host_group)

    @property
    def counters(self) -> dict[str, Tensor]:
        """Running counters that steps change in place, as tensors by name; equal on all ranks."""
        counters = {"history": self.history.entries, "num_updates": self.optimizer.num_updates}
        if self.noise is not None:
            counters["noise"] = self.noise.means
        if self.loss_scale is not None:
            counters["loss_scale"] = self.loss_scale.state
        return counters

    @property
    def lm(self) -> CausalLM:
        """The model, typed as a causal language model."""
        return self.model  # type: ignore[return-value]


@dataclass(frozen=True)
class StepResult:
    """Results of a training step, as () float32 tensors on the device, equal on all ranks.

    Args:
        loss: Mean loss over the tokens of the global batch, or over its pairs.
        grad_norm: Norm of the whole gradient before clipping.
        num_tokens: Number of targets that count; with an objective on answers, the number of pairs or answers.
        others: Further numbers by name. `z_loss` is the mean term that the z-loss adds to a token's loss; `loss` does
            not include it. Objectives on answers add their sums.
        routing: (2,) load balancing loss and z-loss of the routers; None without experts.
        loads: (layers, E + 3) loads of the experts, the rows of `nxtrain.metrics.routers.Loads`; None without experts.
    """

    loss: Tensor
    grad_norm: Tensor
    num_tokens: Tensor
    others: Mapping[str, Tensor] = field(default_factory=dict)
    routing: Tensor | None = None
    loads: Tensor | None = None


def train_step(state: TrainState, batch: DeviceBatch, lr: float) -> StepResult:
    """Compute the gradient of the mean loss over the global batch, clip it, and update the parameters.

    Losses and gradients are summed over tokens and averaged over the ranks of dp x cp. The division by the number of
    tokens per rank is part of the update. So every micro-batch runs the same graph, for any number of micro-batches.

    If the loss or the norm of the gradient is not finite, nothing is updated; the step still counts. Both are NaN
    without a target. With fp16, the update also divides by the loss scale, which an overflow lowers.

    Args:
        state: Training state, changed in place.
        batch: This rank's sequences.
        lr: Learning rate.
    """
    _accumulate(state, batch)
    state.section("reduce")
    sums, loads = _take_sums(state)
    loss, num_tokens, *_ = sums.unbind()
    # Factor that converts the accumulated gradient to the gradient of the mean loss per token.
    per_token = state.mesh.dp_cp.size / num_tokens
    if state.loss_scale is not None:
        per_token = per_token / state.loss_scale.per_position()
    grads = state.gradients.reduce()
    norm, loss = state.gradients.norm(grads) * per_token, loss / num_tokens
    skip = not_finite(loss, norm)
    if state.noise is not None:
        of_rank = sum(inputs.numel() for inputs in batch.inputs)
        (num_positions,) = state.backend.scalars(of_rank * state.mesh.dp.size)
        state.noise.add(grads, per_token, num_positions, skip)
    state.history.note(loss, norm, num_tokens)  # after the last collective before the update, which a lost peer may end
    state.section("optimizer")
    (rate,) = state.backend.scalars(lr)  # uploaded only here, since it becomes part of the next recorded graph
    state.optimizer.step(grads, rate, clip_factor(norm, state.clip) * per_token, skip)
    state.data_parallel.publish()
    if state.loss_scale is not None:
        state.loss_scale.update(skip & (num_tokens > 0))
    return StepResult(loss, norm, num_tokens, *_other_numbers(state, sums), loads)


def _take_sums(state: TrainState) -> tuple[Tensor, Tensor | None]:
    """Sums over the global batch: `TrainState.sums`, the z-loss if any, and the loads of experts; resets them to 0."""
    comm, parts = state.backend.collectives, [state.sums]
    if state.z_sum is not None:
        parts.append(state.z_sum)
    num_sums = sum(map(len, parts))
    if state.loads is not None:
        own = state.loads
        if state.sequence_parallel:
            own = comm.all_reduce(own.clone(), state.mesh.tp)
        parts.append(own.flatten())
    total = comm.all_reduce(torch.cat(parts), state.mesh.batch)
    loads = None
    if state.loads is not None:
        total, loads = total[:num_sums], total[num_sums:].view_as(state.loads)
        state.loads.zero_()
    if state.z_sum is not None:
        state.z_sum.zero_()
    state.sums.zero_()
    return total, loads


def _add(state: TrainState, sums: Tensor) -> None:
    """Add the sums of a micro-batch, and its router losses, to the sums since the last update."""
    if state.lm.routing is not None:
        sums = torch.cat([sums, state.lm.routing])
    state.sums.add_(sums)


def _other_numbers(state: TrainState, sums: Tensor) -> tuple[dict[str, Tensor], Tensor | None]:
    """Numbers of a step besides loss and tokens: `StepResult.others` and `StepResult.routing`."""
    if state.preferences is not None:
        return dict(zip(state.preferences.sums[2:], sums[2:].clone().unbind(), strict=True)), None
    others = {}
    if state.z_sum is not None:
        others["z_loss"] = sums[-1] / sums[1]
    of_routers = sums[2 : len(state.sums)]
    return others, of_routers / sums[1] if len(of_routers) else None


def _accumulate(state: TrainState, batch: DeviceBatch) -> None:
    """Run forward and backward of all micro-batches, and add up their gradients and losses."""
    pairs = _with_reference(state, batch)

    def on_loss(loss: Tensor, targets: Tensor) -> Tensor:
        loss, sums = _objective(state, loss, targets, next(pairs))
        _add(state, sums())
        return loss

    if state.pipeline is not None:
        state.pipeline.train(batch.micro_batches, lambda last: state.data_parallel.begin(last=last), on_loss)
        return
    for index, ((inputs, targets, *documents), own) in enumerate(zip(batch.micro_batches, pairs, strict=True)):
        state.data_parallel.begin(last=index == len(batch.inputs) - 1)
        state.section("forward")
        loss, sums = _objective(state, state.lm.loss(inputs, targets, *documents), targets, own)
        state.section("backward")
        loss.backward()
        _add(state, sums())
        if state.accumulates or len(batch.inputs) > 1:
            state.backend.step_boundary()


def _objective(
    state: TrainState, loss: Tensor, targets: Tensor, pairs: Pairs | None
) -> tuple[Tensor, Callable[[], Tensor]]:
    """Loss with which backward begins, and a function for the sums of a micro-batch, from the output of the model."""
    if state.preferences is not None and pairs is not None:
        loss, counted = state.preferences.loss(loss, pairs)
        return loss, lambda: counted
    return loss, lambda: _sums(loss, targets)


def _sums(loss: Tensor, targets: Tensor) -> Tensor:
    return torch.stack([loss.detach(), (true_targets(targets) != IGNORE_INDEX).sum(dtype=torch.float32)])


def _with_reference(state: TrainState, batch: DeviceBatch) -> Iterator[Pairs | None]:
    """Answers of each micro-batch, with log-probabilities by the reference, which the frozen weights compute if needed.

    Without a pipeline, the frozen weights compute each micro-batch just before its forward pass, in the same graph.
    With a pipeline, all micro-batches are computed first. Labelled answers also get the divergence over the global
    batch.
    """
    preferences, answers = state.preferences, batch.pairs
    if preferences is None:
        return iter([None] * len(batch.inputs))
    if batch.swapped is not None:
        divergence = _divergence(state, batch.swapped)
        answers = [replace(of_rows, divergence=divergence) for of_rows in answers]
    if not preferences.needs_reference or answers[0].reference is not None:
        return iter(answers)
    if state.pipeline is None:
        return map(partial(_beside_frozen, state, preferences), answers, batch.micro_batches)
    references = _by_reference(state, batch)
    return (replace(of_rows, reference=given) for of_rows, given in zip(answers, references, strict=False))


@torch.no_grad()
def _divergence(state: TrainState, swapped: DeviceBatch) -> Tensor:
    assert isinstance(state.preferences, Kto)
    log_probs, of_reference = answer_log_probs(state, swapped), _by_reference(state, swapped)
    divergence = state.preferences.divergence(log_probs, of_reference, swapped.pairs, state.mesh.batch)
    state.backend.step_boundary()
    return divergence


def _by_reference(state: TrainState, batch: DeviceBatch) -> Sequence[Tensor]:
    given = [answers.reference for answers in batch.pairs if answers.reference is not None]
    if given:
        return given
    with without_adapters(state.model):
        return answer_log_probs(state, batch)


@torch.no_grad()
def _beside_frozen(state: TrainState, preferences: Preferences, pairs: Pairs, micro_batch: tuple[Tensor, ...]) -> Pairs:
    with without_adapters(state.model):
        return replace(pairs, reference=preferences.log_probs(state.lm.loss(*micro_batch), pairs))


@torch.no_grad()
def answer_log_probs(state: TrainState, batch: DeviceBatch) -> list[Tensor]:
    """Log-probabilities of the answers of each micro-batch, (B, 2K) float32; empty before the last pipeline stage."""
    preferences = state.preferences
    assert preferences is not None
    log_probs: list[Tensor] = []

    def note(losses: Tensor, _: Tensor) -> Tensor:
        log_probs.append(preferences.log_probs(losses, batch.pairs[len(log_probs)]))
        return losses

    if state.pipeline is not None:
        state.pipeline.evaluate(batch.micro_batches, note)
        return log_probs
    for inputs, targets, *documents in batch.micro_batches:
        note(state.lm.loss(inputs, targets, *documents), targets)
        state.backend.step_boundary()
    return log_probs


@torch.no_grad()
def eval_step(state: TrainState, batch: DeviceBatch) -> list[tuple[Tensor, ...]]:
    """Loss sum and token count of each micro-batch, or the `Preferences.sums` over its answers, without gradients.

    Each number is () float32, equal on all ranks. Every micro-batch runs the same graph, and nothing is accumulated on
    the device.
    """
    sums = []
    pairs = _with_reference(state, batch)
    if state.pipeline is not None:
        here: list[Tensor] = []

        def on_loss(loss: Tensor, targets: Tensor) -> Tensor:
            here.append(_objective(state, loss, targets, next(pairs))[1]())
            return loss

        state.pipeline.evaluate(batch.micro_batches, on_loss)
        for index in range(len(batch.inputs)):
            size = 2 if state.preferences is None else len(state.preferences.sums)
            sums.append(_over_batch(state, here[index] if here else state.sums.new_zeros(size)))
            state.backend.step_boundary()
        return sums
    for (inputs, targets, *documents), own in zip(batch.micro_batches, pairs, strict=True):
        # The loss gets no name: a tensor that is still referenced at the boundary would be an output of the graph.
        counted = _objective(state, state.lm.loss(inputs, targets, *documents), targets, own)[1]
        sums.append(_over_batch(state, counted()))
        del counted
        state.backend.step_boundary()
    return sums


def _over_batch(state: TrainState, sums: Tensor) -> tuple[Tensor, ...]:
    total = state.backend.collectives.all_reduce(sums, state.mesh.batch)
    return tuple(number.clone() for number in total.unbind())  # views would be graph outputs in a varying order
