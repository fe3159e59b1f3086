"""Pipeline stage of one rank: runs a schedule of forwards, backwards, and transfers between neighbouring stages.

The autograd graph of a chunk ends at the chunk's borders. A received tensor is a leaf of the graph, and its gradient is
sent back. A sent tensor ends the graph, and its backward pass begins with the gradient that is received for the tensor.

Reasons against `torch.distributed.pipelining`: its stages use process groups, which PyTorch/XLA lacks. It orders
transfers for buffered sends, but on XLA a transfer is a collective of two ranks. Its interleaved schedule needs
micro-batches that divide into rounds. It scales gradients by the number of micro-batches, while losses here are sums
over tokens. It leaves tied embeddings to its caller.

Reasons against `NxDPPModel`, even with its manual partition, which needs no tracing: it has no virtual stages, and it
renames parameters. It counts a tied matrix once per stage in the gradient norm. It weighs all micro-batches alike,
however few of their tokens count. From NeuronX Distributed come the layers, the transfer over pairs of ranks, and the
order of computation.

Source: Narayanan et al. 2021 (arXiv:2104.04473); src/neuronx_distributed/pipeline/{model,manual_pipe_stage,comm}.py in
https://github.com/aws-neuron/neuronx-distributed at v0.18.

Shapes: S sequence, B batch, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nxtrain.common.distributed.collectives import Collectives, Done, Pending
from nxtrain.common.errors import NxtrainError
from nxtrain.common.family import CausalLM
from nxtrain.common.mesh import Mesh
from nxtrain.common.stages import StagePart
from nxtrain.parallel.saved_tensors import save_copies_of_views
from nxtrain.parallel.schedule import Action, Order, Schedule, evaluation_schedule, schedule, with_exchanges
from nxtrain.parallel.weight_grads import Postponed, WeightGradients, compute

MicroBatches = Sequence[tuple[Any, ...]]
"""Micro-batches of a rank: tokens, targets, and optionally the document starts for attention masks, (B, S) each.

Only the first stage reads tokens, and only the last reads targets. Every stage gets the document starts from its own
data loader.
"""

OnLoss = Callable[[Tensor, Tensor], Tensor]
"""Callback for the model's loss and the targets of each micro-batch, called in order on the last stage.

The callback returns the () loss with which backward begins.
"""


class StageError(RuntimeError):
    """Failure of a pipeline stage; `__cause__` is the original exception."""


@dataclass
class _ReceivedGrads:
    """Holder of the gradients received for a chunk's sent tensors, where the chunk's autograd graph ends."""

    grads: Sequence[Tensor] = ()


class _EndChunk(torch.autograd.Function):
    """Autograd function that replaces a sent state by a scalar, so that the graph does not keep the state alive.

    The backward pass continues with the gradients that the next stage has sent back.
    """

    @staticmethod
    def forward(ctx: Any, received_grads: _ReceivedGrads, *state: Tensor) -> Tensor:
        ctx.received_grads = received_grads
        return state[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.received_grads.grads


@dataclass(frozen=True)
class _ForwardPass:
    """Autograd state of a micro-batch in a chunk, kept from its forward pass to its backward pass.

    Args:
        entered: The received tensors, leaves of the graph; none in the first stage.
        end: Tensor with which backward begins.
        received_grads: Holder of the gradients of the sent tensors.
    """

    entered: Sequence[Tensor]
    end: Tensor
    received_grads: _ReceivedGrads


Item = tuple[str, int, int]
"""Key of a transferred tensor: `forward` for a hidden state or `backward` for its gradient, chunk, and micro-batch."""

State = Sequence[Tensor]
"""Tensors that one stage sends to the next: hidden state, (S/tp, B, D), and with experts the router data so far."""


@dataclass(frozen=True)
class _InFlight:
    """Transfers and micro-batches in progress during a pass over a batch.

    Attributes:
        received: Receives that were started and whose tensors are not yet used.
        forward_passes: Forward passes still without their backward pass, by chunk and micro-batch.
        postponed: Weight gradients not yet computed, by chunk and micro-batch.
        to_send: Computed states and gradients that are not yet being sent.
        sent: Last send of each direction, kept until it is complete.
    """

    received: dict[Item, Sequence[Pending[Tensor]]] = field(default_factory=dict)
    forward_passes: dict[tuple[int, int], _ForwardPass] = field(default_factory=dict)
    postponed: dict[tuple[int, int], Postponed] = field(default_factory=dict)
    to_send: dict[Item, State] = field(default_factory=dict)
    sent: dict[str, Sequence[Pending[None]]] = field(default_factory=dict)


class Pipeline:
    """Pipeline stage that runs micro-batches through the chunks of one rank.

    Args:
        model: Model built of this rank's blocks.
        parts: Part of the model in each chunk.
        mesh: Mesh of the run.
        comm: Collectives.
        boundary: Step boundary of the device: runs the recorded graph.
        blanks: Tensors with the shapes and types of a transferred state; their values are not used.
        weight_grads: Postponed weight gradients of the layers, for the ZB-H1 schedule; None for 1F1B.

    Attributes:
        watch: Context entered for each action, after its wait; for measurements and tracing.
    """

    def __init__(
        self,
        model: CausalLM,
        parts: Sequence[StagePart],
        mesh: Mesh,
        comm: Collectives,
        boundary: Callable[[], None],
        blanks: State,
        weight_grads: WeightGradients | None = None,
    ) -> None:
        self._model = model
        self._parts = parts
        self._comm = comm
        self._boundary = boundary
        self._blanks, self._weight_grads = blanks, weight_grads
        self._pp, self._place = mesh.pp, mesh.rank_name(mesh.rank)
        self.watch: Callable[[Action], AbstractContextManager[object]] = nullcontext

    def train(self, batch: MicroBatches, begin_backward: Callable[[bool], None], on_loss: OnLoss) -> None:
        """Run forward and backward of this rank's share of a global batch.

        Args:
            batch: The micro-batches.
            begin_backward: Called before each backward action; its argument is True for the last micro-batch.
            on_loss: Called with the loss and targets of each micro-batch, on the last stage.
        """
        order: Order = "zero_bubble" if self._weight_grads else "1f1b"
        actions = schedule(self._pp.size, len(self._parts), len(batch), order)
        self._carry_out(actions, batch, begin_backward, on_loss)

    @torch.no_grad()
    def evaluate(self, batch: MicroBatches, on_loss: OnLoss) -> None:
        """Run only the forward of this rank's share of a global batch; arguments as in `train`."""
        actions = evaluation_schedule(self._pp.size, len(self._parts), len(batch))
        self._carry_out(actions, batch, lambda last: None, on_loss)

    def _carry_out(
        self, actions: Schedule, batch: MicroBatches, begin_backward: Callable[[bool], None], on_loss: OnLoss
    ) -> None:
        in_flight = _InFlight()
        rank = self._pp.rank
        # Recorded transfers run in sequence, so a send and a receive are joined; eager ones overlap anyway.
        steps = with_exchanges(actions)[rank] if self._comm.lazy else ((action,) for action in actions[rank])
        for action, *more in steps:
            try:
                received = self._await(action, in_flight)
                with self.watch(action):
                    if action.kind == "forward":
                        self._forward(action, received, in_flight, batch, on_loss)
                    elif action.kind == "backward":
                        begin_backward(action.micro == len(batch) - 1)
                        self._backward(action, received, in_flight)
                    elif action.kind == "weight":
                        begin_backward(action.micro == len(batch) - 1)
                        compute(in_flight.postponed.pop((action.chunk, action.micro)))
                    elif more:
                        self._exchange(action, more[0], in_flight)
                    else:
                        self._transfer(action, in_flight)
            except NxtrainError:
                raise
            except Exception as error:
                raise StageError(f"{self._place} failed in {action}: {type(error).__name__}: {error}") from error
        for direction in tuple(in_flight.sent):
            _complete(direction, in_flight)

    def _await(self, action: Action, in_flight: _InFlight) -> State:
        """Wait for the tensors that a computation receives from another stage; empty if the computation needs none."""
        part = self._parts[action.chunk]
        starts = {"forward": part.first, "backward": part.last}  # without input from another stage
        if starts.get(action.kind, True):
            return ()
        return [pending.wait() for pending in in_flight.received.pop((action.kind, action.chunk, action.micro))]

    def _forward(
        self, action: Action, entered: State, in_flight: _InFlight, batch: MicroBatches, on_loss: OnLoss
    ) -> None:
        chunk, micro = action.chunk, action.micro
        part = self._parts[chunk]
        tokens, targets, *documents = batch[micro]
        for leaf in entered:
            leaf.requires_grad_(torch.is_grad_enabled())
        state = entered or (tokens,)
        received_grads = _ReceivedGrads()
        saving: AbstractContextManager[None] = nullcontext()
        if self._comm.lazy:  # eager views need no memory
            saving = save_copies_of_views()
        with saving:
            out = self._model.run(part, state, targets if part.last else None, *documents)
        if part.last:
            (loss,) = out
            end = on_loss(loss, targets)
        else:
            in_flight.to_send["forward", chunk, micro] = [tensor.data for tensor in out]
            end = _EndChunk.apply(received_grads, *out)
        del out  # frees the sent state; `end` keeps the graph
        if torch.is_grad_enabled():
            in_flight.forward_passes[chunk, micro] = _ForwardPass(entered, end, received_grads)
        self._boundary()

    def _backward(self, action: Action, received: State, in_flight: _InFlight) -> None:
        chunk, micro = action.chunk, action.micro
        forward_pass = in_flight.forward_passes.pop((chunk, micro))
        forward_pass.received_grads.grads = received
        if forward_pass.end.requires_grad:  # frozen layers before the first adapters need no gradient
            forward_pass.end.backward()
        if self._weight_grads:
            in_flight.postponed[chunk, micro] = self._weight_grads.take()
        if forward_pass.entered:
            # Without losses of the routers, nothing depends on the routing.
            grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in forward_pass.entered]
            assert forward_pass.entered[0].grad is not None, "the output of a chunk does not depend on its input"
            in_flight.to_send["backward", chunk, micro] = grads
        self._boundary()

    def _transfer(self, action: Action, in_flight: _InFlight) -> None:
        item, peer = _item(action), self._peer(action)
        if not action.is_send:
            in_flight.received[item] = [self._comm.start_receive(blank, self._pp, peer) for blank in self._blanks]
            return
        direction = item[0]
        _complete(direction, in_flight)  # at most one send of each direction waits for a slow receiver
        state = in_flight.to_send.pop(item)
        in_flight.sent[direction] = [self._comm.start_send(tensor.contiguous(), self._pp, peer) for tensor in state]

    def _exchange(self, one: Action, other: Action, in_flight: _InFlight) -> None:
        send, receive = one, other
        if receive.is_send:
            send, receive = receive, send
        peer = self._peer(send)
        state = in_flight.to_send.pop(_item(send))
        in_flight.received[_item(receive)] = [
            Done(self._comm.exchange(tensor.contiguous(), self._pp, peer)) for tensor in state
        ]

    def _peer(self, action: Action) -> int:
        """Pipeline rank at the other end of a transfer."""
        return action.other_end(self._pp.rank, self._pp.size)[0]


def _complete(direction: str, in_flight: _InFlight) -> None:
    """Wait for the last send of a direction (`forward` or `backward`), if one is in progress."""
    for pending in in_flight.sent.pop(direction, ()):
        pending.wait()


def _item(action: Action) -> Item:
    return action.kind.rpartition("_")[2], action.chunk, action.micro
