"""One rank's share of a pipeline: carries out a schedule, forward and backward, between its neighbours.

Autograd knows nothing of other stages. What a part receives is a leaf, whose gradient is sent back; what it sends ends
its graph, which begins backward with the gradient that comes back.

Why not `torch.distributed.pipelining`: its stages talk through process groups, which PyTorch/XLA has none of, and order
their transfers for buffered sends, which an all-gather between two ranks is not; its interleaved schedule asks for
micro-batches that divide into rounds; it scales gradients by the number of micro-batches, where ours are sums over
tokens; a tied embedding is left to its caller. Why not `NxDPPModel`, whose manual partition traces nothing either: it
has no virtual stages, renames parameters, counts a tied matrix once per stage in the gradient norm, and weighs each
micro-batch alike, however few of its tokens count. Of NeuronX Distributed we take the layers, the transfer over pairs
of ranks, and the order of computation.

Source: Narayanan et al. 2021 (arXiv:2104.04473); src/neuronx_distributed/pipeline/{model,manual_pipe_stage,comm}.py in
https://github.com/aws-neuron/neuronx-distributed at v0.18.

Shapes: S sequence, B batch, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nxtrain.distributed.collectives import Collectives, Done, Pending
from nxtrain.errors import NxtrainError
from nxtrain.family import CausalLM
from nxtrain.mesh import Axis
from nxtrain.parallel.saved_tensors import no_views
from nxtrain.parallel.schedule import Action, Order, Schedule, evaluation_schedule, schedule, with_exchanges
from nxtrain.parallel.weight_grads import Postponed, WeightGradients, compute
from nxtrain.stages import Part

MicroBatches = Sequence[tuple[Tensor, Tensor]]
"""Tokens and targets, (B, S) each; only a pipeline's first stage reads the ones, and its last the others."""

Found = Callable[[Tensor, Tensor], None]
"""Takes the loss and the targets of a micro-batch, in order, on the last stage."""


class StageError(RuntimeError):
    """A pipeline stage failed; the cause is the error itself."""


@dataclass
class _Exit:
    """Where a part's graph ends: holds the gradient that came back for what was sent."""

    grad: Tensor | None = None


class _Leave(torch.autograd.Function):
    """A number in place of a hidden state, so that the graph does not keep what was sent."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exit_: _Exit) -> Tensor:
        ctx.exit_ = exit_
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, None]:
        return ctx.exit_.grad, None


@dataclass(frozen=True)
class _Passage:
    """A micro-batch in a part, from its forward pass to its backward pass.

    Args:
        entered: The leaf that was received; None in the first part.
        end: What backward begins with.
        exit_: Where the gradient of what was sent goes.
    """

    entered: Tensor | None
    end: Tensor
    exit_: _Exit


Item = tuple[str, int, int]
"""A hidden state, or the gradient of one: `forward` or `backward`, chunk and micro-batch of the part at this end."""


@dataclass(frozen=True)
class _Underway:
    """What a pass over a batch has in hand.

    Attributes:
        received: What was asked for and is not yet used.
        passages: Parts whose backward pass is to come, by chunk and micro-batch.
        postponed: Weights that still lack the gradients of a backward pass, by chunk and micro-batch.
        to_send: What was computed and is not yet on its way.
        sent: The last of each direction, kept until it has arrived.
    """

    received: dict[Item, Pending[Tensor]] = field(default_factory=dict)
    passages: dict[tuple[int, int], _Passage] = field(default_factory=dict)
    postponed: dict[tuple[int, int], Postponed] = field(default_factory=dict)
    to_send: dict[Item, Tensor] = field(default_factory=dict)
    sent: dict[str, Pending[None]] = field(default_factory=dict)


class Pipeline:
    """Runs micro-batches through the parts of one rank.

    Args:
        model: Built of this rank's parts.
        parts: Those, by chunk.
        pp: Pipeline axis.
        comm: Collectives.
        boundary: Hands what was recorded to the device.
        blank: A tensor of the shape and type of what stages send, (S/tp, B, D); its values mean nothing.
        place: This rank in words.
        weight_grads: What the model's layers postpone, which makes the schedule that of ZB-H1; None: 1F1B.

    Attributes:
        watch: Entered for each action, when what it waited for is there; for those who measure or trace.
    """

    def __init__(
        self,
        model: CausalLM,
        parts: Sequence[Part],
        pp: Axis,
        comm: Collectives,
        boundary: Callable[[], None],
        blank: Tensor,
        place: str,
        weight_grads: WeightGradients | None = None,
    ) -> None:
        self._model, self._parts, self._pp, self._comm = model, parts, pp, comm
        self._boundary, self._blank, self._place, self._weight_grads = boundary, blank, place, weight_grads
        self.watch: Callable[[Action], AbstractContextManager[object]] = nullcontext

    def train(self, batch: MicroBatches, begin_backward: Callable[[bool], None], found: Found) -> None:
        """Forward and backward of this rank's part of a global batch.

        Args:
            batch: Its micro-batches.
            begin_backward: Called before each backward pass, or part of one; told whether it is its chunk's last.
            found: Is given the losses.
        """
        order: Order = "zero_bubble" if self._weight_grads else "1f1b"
        actions = schedule(self._pp.size, len(self._parts), len(batch), order)
        self._carry_out(actions, batch, begin_backward, found)

    @torch.no_grad()
    def evaluate(self, batch: MicroBatches, found: Found) -> None:
        """Forward of this rank's part of a global batch; arguments as in `train`."""
        actions = evaluation_schedule(self._pp.size, len(self._parts), len(batch))
        self._carry_out(actions, batch, lambda last: None, found)

    def _carry_out(
        self, actions: Schedule, batch: MicroBatches, begin_backward: Callable[[bool], None], found: Found
    ) -> None:
        underway = _Underway()
        rank = self._pp.rank
        # Where transfers are recorded they follow each other; elsewhere those both ways are under way at once anyhow.
        steps = with_exchanges(actions)[rank] if self._comm.lazy else ((action,) for action in actions[rank])
        for action, *more in steps:
            with self._told(action):
                came = self._await(action, underway)
                with self.watch(action):
                    if action.kind == "forward":
                        self._forward(action, came, underway, batch, found)
                    elif action.kind == "backward":
                        begin_backward(action.micro == len(batch) - 1)
                        self._backward(action, came, underway)
                    elif action.kind == "weight":
                        begin_backward(action.micro == len(batch) - 1)
                        compute(underway.postponed.pop((action.chunk, action.micro)))
                    elif more:
                        self._exchange(action, more[0], underway)
                    else:
                        self._transfer(action, underway)
        for pending in underway.sent.values():
            pending.wait()

    def _await(self, action: Action, underway: _Underway) -> Tensor | None:
        """What another stage made for a computation; None if it needs nothing."""
        part = self._parts[action.chunk]
        starts = {"forward": part.first, "backward": part.last}  # from nothing that another stage has
        if starts.get(action.kind, True):
            return None
        return underway.received.pop((action.kind, action.chunk, action.micro)).wait()

    def _forward(
        self, action: Action, entered: Tensor | None, underway: _Underway, batch: MicroBatches, found: Found
    ) -> None:
        chunk, micro = action.chunk, action.micro
        part = self._parts[chunk]
        tokens, targets = batch[micro]
        if entered is not None:
            entered.requires_grad_(torch.is_grad_enabled())
        x = tokens if entered is None else entered
        exit_ = _Exit()
        with self._keeping():
            out = self._model.run(part, x, targets if part.last else None)
        if part.last:
            end = out
            found(end, targets)
        else:
            underway.to_send["forward", chunk, micro] = out.data
            end = _Leave.apply(out, exit_)
        del out  # of a part that is not the last, only its graph stays
        if torch.is_grad_enabled():
            underway.passages[chunk, micro] = _Passage(entered, end, exit_)
        self._boundary()

    def _keeping(self) -> AbstractContextManager[None]:
        """How autograd keeps what backward needs: eager devices give views no memory of their own."""
        return no_views() if self._comm.lazy else nullcontext()

    def _backward(self, action: Action, came: Tensor | None, underway: _Underway) -> None:
        chunk, micro = action.chunk, action.micro
        passage = underway.passages.pop((chunk, micro))
        passage.exit_.grad = came
        passage.end.backward()
        if self._weight_grads:
            underway.postponed[chunk, micro] = self._weight_grads.take()
        if passage.entered is not None:
            assert passage.entered.grad is not None, "every part depends on what enters it"
            underway.to_send["backward", chunk, micro] = passage.entered.grad
        self._boundary()

    def _transfer(self, action: Action, underway: _Underway) -> None:
        item, peer = _item(action), self._peer(action)
        if not action.is_send:
            underway.received[item] = self._comm.start_receive(self._blank, self._pp, peer)
            return
        direction = item[0]
        if direction in underway.sent:  # no more than one of each direction is kept for a slow receiver
            underway.sent.pop(direction).wait()
        underway.sent[direction] = self._comm.start_send(underway.to_send.pop(item).contiguous(), self._pp, peer)

    def _exchange(self, one: Action, other: Action, underway: _Underway) -> None:
        send, receive = (one, other) if one.is_send else (other, one)
        out = underway.to_send.pop(_item(send)).contiguous()
        underway.received[_item(receive)] = Done(self._comm.exchange(out, self._pp, self._peer(send)))

    def _peer(self, action: Action) -> int:
        """Position of the other rank of a transfer."""
        return action.other_end(self._pp.rank, self._pp.size)[0]

    @contextmanager
    def _told(self, action: Action) -> Iterator[None]:
        """Say which stage failed, and at what."""
        try:
            yield
        except NxtrainError:
            raise
        except Exception as error:
            raise StageError(f"{self._place} failed in {action}: {type(error).__name__}: {error}") from error


def _item(action: Action) -> Item:
    return action.kind.rpartition("_")[2], action.chunk, action.micro
