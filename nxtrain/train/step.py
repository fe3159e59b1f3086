"""One update, from token ids to new weights, all of it on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nxtrain.backends.base import Backend
from nxtrain.family import IGNORE_INDEX, CausalLM
from nxtrain.mesh import Mesh
from nxtrain.optim.adamw import AdamW
from nxtrain.parallel.data_parallel import DataParallel
from nxtrain.parallel.grads import Gradients, clip_factor
from nxtrain.precision import Precision
from nxtrain.sharding import Layout, ParamTable


@dataclass(frozen=True)
class TrainState:
    """What a step reads and changes.

    Args:
        model: Built and filled.
        data_parallel: What is shared with the other data parallel ranks, and what this one updates.
        gradients: Reduction and norm.
        optimizer: Update rule with its state.
        backend: Device and collectives.
        precision: Types of everything.
        clip: Largest global gradient norm; 0: never clip.
    """

    model: nn.Module
    data_parallel: DataParallel
    gradients: Gradients
    optimizer: AdamW
    backend: Backend
    precision: Precision
    clip: float

    @property
    def layout(self) -> Layout:
        """The entries of the model that this rank updates."""
        return self.data_parallel.layout

    @property
    def table(self) -> ParamTable:
        """How the parameters are cut over tp."""
        return self.layout.table

    @property
    def mesh(self) -> Mesh:
        """The axes of this rank."""
        return self.layout.mesh

    @property
    def lm(self) -> CausalLM:
        """The model as what computes losses."""
        return self.model  # type: ignore[return-value]


@dataclass(frozen=True)
class DeviceBatch:
    """This rank's part of a global batch, on the device.

    Args:
        inputs, targets: (num_micro, B, S) int64; targets of `IGNORE_INDEX` do not count.
    """

    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True)
class StepResult:
    """What a step found, as () float32 tensors on the device, equal on all ranks.

    Args:
        loss: Mean over the tokens of the global batch.
        grad_norm: Of the whole gradient, before clipping.
        num_tokens: Targets that counted.
    """

    loss: Tensor
    grad_norm: Tensor
    num_tokens: Tensor


def train_step(state: TrainState, batch: DeviceBatch, lr: Tensor) -> StepResult:
    """Compute the gradient of the mean loss over the global batch's tokens, clip it and update.

    The one divisor is the number of tokens in the global batch. Each rank divides by the mean number per data parallel
    rank, which keeps gradients at the size of a mean, and the reduction averages over those ranks.

    Args:
        state: Changed in place.
        batch: This rank's sequences.
        lr: () float32 on the device.
    """
    dp, comm = state.mesh.dp, state.backend.collectives
    num_tokens = comm.all_reduce(_count(batch.targets), dp)
    token_weight = dp.size / num_tokens
    loss = torch.zeros_like(num_tokens)
    num_micro = len(batch.inputs)
    for index, (inputs, targets) in enumerate(zip(batch.inputs, batch.targets, strict=True)):
        state.data_parallel.begin(last=index == num_micro - 1)
        micro_loss = state.lm.loss(inputs, targets, token_weight)
        micro_loss.backward()
        loss = loss + micro_loss.detach()
    grads = state.gradients.reduce()
    norm = state.gradients.norm(grads)
    state.optimizer.step(grads, lr, clip_factor(norm, state.clip))
    state.data_parallel.publish()
    return StepResult(comm.all_reduce(loss, dp) / dp.size, norm, num_tokens)


@torch.no_grad()
def eval_step(state: TrainState, batch: DeviceBatch) -> tuple[Tensor, Tensor]:
    """Sum of the losses and number of tokens of a global batch: () and () float32 on the device, equal on all ranks."""
    one = torch.ones_like(_count(batch.targets))
    losses = [state.lm.loss(i, t, one) for i, t in zip(batch.inputs, batch.targets, strict=True)]
    sums = torch.stack([torch.stack(losses).sum(), _count(batch.targets)])
    loss, num_tokens = state.backend.collectives.all_reduce(sums, state.mesh.dp).unbind()
    return loss, num_tokens


def _count(targets: Tensor) -> Tensor:
    return (targets != IGNORE_INDEX).sum(dtype=torch.float32)
