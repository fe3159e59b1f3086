"""One training step on the device, from token ids to new weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from nxtrain.backends.base import Backend
from nxtrain.common.distributed.agreement import Ranks
from nxtrain.common.family import CausalLM
from nxtrain.common.mesh import Mesh
from nxtrain.common.sharding import Layout, ParamTable
from nxtrain.common.vocab import IGNORE_INDEX
from nxtrain.metrics.run_observer import RunObserver, Section
from nxtrain.optim.adamw import AdamW
from nxtrain.optim.loss_scale import LossScale
from nxtrain.parallel.data_parallel import DataParallel
from nxtrain.parallel.grads import Gradients, clip_factor
from nxtrain.parallel.noise_scale import NoiseScale
from nxtrain.parallel.pipeline import MicroBatches, Pipeline
from nxtrain.parallel.precision import Precision
from nxtrain.parallel.schedule import Action
from nxtrain.train.health.step_history import StepHistory, not_finite

_SECTIONS: dict[str, Section] = {"forward": "forward", "backward": "backward", "weight": "backward"}
"""Sections of a pipeline's actions; transfers belong to the section before them."""


@dataclass(frozen=True)
class TrainState:
    """State that a training step reads and updates.

    Args:
        model: The model, built and filled.
        data_parallel: Parameters shared with the other data parallel ranks, and the shards that this rank updates.
        gradients: Reduction and norm of the gradients.
        optimizer: Update rule with its state.
        pipeline: The stages' work on a batch; None: one stage is the whole model.
        num_params: Number of parameters of the whole model that are trained.
        backend: Device and collectives.
        precision: Types of parameters, gradients and optimizer state.
        clip: Largest global gradient norm; 0: never clip.
        sums: (2,) float32 on the device, loss and tokens of the micro-batches since the last update.
        history: Losses and gradient norms of the last steps.
        section: Called as each section of a step begins.
        loss_scale: Factor of fp16 gradients; None: 1.
        noise: Meter of the gradient noise scale; None: it is not measured.
        z_sum: (1,) float32 on the device, terms of the z-loss since the last update; None: there is no z-loss.
        accumulates: Some steps of the run have several micro-batches, so that each micro-batch is a graph of its own.
        positions: Positions of a sequence that this rank computes under context parallelism; None: all.
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
    positions: Tensor | None = None

    def reporting(self, section: Callable[[Section], None]) -> TrainState:
        """The same state, whose steps report their sections."""

        def watch(action: Action) -> AbstractContextManager[None]:
            if action.kind in _SECTIONS:
                section(_SECTIONS[action.kind])
            return nullcontext()

        if self.pipeline is not None:
            self.pipeline.watch = watch
        return replace(self, section=section)

    @property
    def layout(self) -> Layout:
        """The entries of the model that this rank updates."""
        return self.data_parallel.layout

    @property
    def table(self) -> ParamTable:
        """Parameters of this rank's stage with their sharding over tp."""
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
    def lm(self) -> CausalLM:
        """The model with the type of a causal language model."""
        return self.model  # type: ignore[return-value]


@dataclass(frozen=True)
class DeviceBatch:
    """This rank's part of a global batch, on the device.

    Args:
        inputs, targets: (B, S) int64 for each micro-batch, at this rank's positions; targets of `IGNORE_INDEX` do not
            count.
        starts: First position of each position's document, likewise; empty without masks between documents.
    """

    inputs: Sequence[Tensor]
    targets: Sequence[Tensor]
    starts: Sequence[Tensor] = ()

    @property
    def micro_batches(self) -> MicroBatches:
        """Arguments of `CausalLM.loss` for each micro-batch."""
        return list(zip(*filter(len, (self.inputs, self.targets, self.starts)), strict=True))

    @staticmethod
    def of(
        inputs: Tensor,
        targets: Tensor,
        put: Callable[[Tensor], Tensor],
        starts: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> DeviceBatch:
        """Upload host tensors of whole sequences, (num_micro, B, S), each micro-batch alone.

        Slices of one device tensor would give each micro-batch a graph of its own on a lazy device. Targets were
        shifted in the whole sequences, so that the division between ranks changes none.

        Args:
            starts: First position of each position's document; None: a row is one document.
            positions: Positions of this rank under context parallelism; None: all.
        """

        def put_each(tensor: Tensor) -> list[Tensor]:
            if positions is not None:
                tensor = tensor.index_select(-1, positions)
            return [put(micro_batch.contiguous()) for micro_batch in tensor]

        if starts is None:
            return DeviceBatch(put_each(inputs), put_each(targets))
        return DeviceBatch(put_each(inputs), put_each(targets), put_each(starts))


@dataclass(frozen=True)
class StepResult:
    """Results of a step as () float32 tensors on the device, equal on all ranks.

    Args:
        loss: Mean over the tokens of the global batch.
        grad_norm: Norm of the whole gradient before clipping.
        num_tokens: Number of targets that counted.
        z_loss: Mean of the terms that the z-loss adds to the tokens' losses, and that `loss` is without; None: none.
    """

    loss: Tensor
    grad_norm: Tensor
    num_tokens: Tensor
    z_loss: Tensor | None = None


def train_step(state: TrainState, batch: DeviceBatch, lr: float) -> StepResult:
    """Compute the gradient of the mean loss over the global batch's tokens, clip it and update.

    Losses and gradients are summed over tokens and averaged over the ranks of dp x cp. The division by the number of
    tokens per rank comes with the update. So every micro-batch is the same work, whatever their number.

    If the loss or the norm of the gradient is not finite, nothing is updated; the step still counts. With fp16, the
    update also divides by the loss scale, which a step that is not finite lowers.

    Args:
        state: Train state, changed in place.
        batch: This rank's sequences.
        lr: Learning rate.
    """
    _accumulate(state, batch)
    state.section("reduce")
    loss, num_tokens, *z_sum = _take_sums(state).unbind()
    per_token = _per_token(state, num_tokens)
    grads = state.gradients.reduce()
    norm, loss = state.gradients.norm(grads) * per_token, loss / num_tokens
    skip = not_finite(loss, norm)
    state.history.note(loss, norm)
    if state.noise is not None:
        state.noise.add(grads, per_token, num_tokens, skip)
    state.section("optimizer")
    _update(state, grads, norm, per_token, lr, skip)
    return StepResult(loss, norm, num_tokens, *(total / num_tokens for total in z_sum))


def _take_sums(state: TrainState) -> Tensor:
    """Sums of the loss, of the tokens and of the z-loss, if any, over the global batch; the next step begins at 0."""
    if state.z_sum is None:
        total = state.backend.collectives.all_reduce(state.sums.clone(), state.mesh.batch)
    else:
        total = state.backend.collectives.all_reduce(torch.cat([state.sums, state.z_sum]), state.mesh.batch)
        state.z_sum.zero_()
    state.sums.zero_()
    return total


def _accumulate(state: TrainState, batch: DeviceBatch) -> None:
    """Add up the gradients and the losses of all micro-batches."""

    def found(loss: Tensor, targets: Tensor) -> None:
        state.sums.add_(_sums(loss, targets))

    if state.pipeline is not None:
        state.pipeline.train(batch.micro_batches, lambda last: state.data_parallel.begin(last=last), found)
        return
    for index, (inputs, targets, *documents) in enumerate(batch.micro_batches):
        state.data_parallel.begin(last=index == len(batch.inputs) - 1)
        state.section("forward")
        loss = state.lm.loss(inputs, targets, *documents)
        state.section("backward")
        loss.backward()
        found(loss, targets)
        if state.accumulates or len(batch.inputs) > 1:
            state.backend.step_boundary()


def _per_token(state: TrainState, num_tokens: Tensor) -> Tensor:
    """Factor that makes the gradient of the mean loss of what backward passes add up."""
    per_token = state.mesh.dp_cp.size / num_tokens
    return per_token if state.loss_scale is None else per_token / state.loss_scale.per_position()


def _update(
    state: TrainState, grads: Mapping[str, Tensor], norm: Tensor, per_token: Tensor, lr: float, skip: Tensor
) -> None:
    """Update the parameters by clipped gradients, and publish them."""
    (rate,) = state.backend.scalars(lr)  # only here: an uploaded number joins the graph that is recorded next
    state.optimizer.step(grads, rate, clip_factor(norm, state.clip) * per_token, skip)
    state.data_parallel.publish()
    if state.loss_scale is not None:
        state.loss_scale.update(skip)


@torch.no_grad()
def eval_step(state: TrainState, batch: DeviceBatch) -> list[tuple[Tensor, Tensor]]:
    """Sum of the losses and number of tokens of each micro-batch: () and () float32, equal on all ranks.

    Every micro-batch runs the same graph; nothing is accumulated on the device across them.
    """
    sums = []
    if state.pipeline is not None:
        here: list[Tensor] = []
        state.pipeline.evaluate(batch.micro_batches, lambda loss, targets: here.append(_sums(loss, targets)))
        for index in range(len(batch.inputs)):
            sums.append(_over_batch(state, here[index] if here else torch.zeros_like(state.sums)))
            state.backend.step_boundary()
        return sums
    for inputs, targets, *documents in batch.micro_batches:
        sums.append(_over_batch(state, _sums(state.lm.loss(inputs, targets, *documents), targets)))
        state.backend.step_boundary()
    return sums


def _over_batch(state: TrainState, sums: Tensor) -> tuple[Tensor, Tensor]:
    loss, num_tokens = state.backend.collectives.all_reduce(sums, state.mesh.batch).unbind()
    return loss.clone(), num_tokens.clone()  # views would be outputs of the graph in an order that varies


def _sums(loss: Tensor, targets: Tensor) -> Tensor:
    return torch.stack([loss.detach(), (targets != IGNORE_INDEX).sum(dtype=torch.float32)])
