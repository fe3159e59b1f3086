"""The graph of an update on the backend of Trainium, and what it computes; imported by name in its process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.backends.neuron.backend import NeuronBackend
from nxtrain.config.check import Resolved
from nxtrain.train.step import train_step
from tests.support.neuron_runtime import Runtime
from tests.support.parity import LR, batches, local_batch, start


@dataclass(frozen=True)
class Update:
    """The first update of a run with accumulation.

    Args:
        text: Its HLO, as the compiler gets it: norm, clipping and update, and nothing of the model.
        before, after: Parameters by name, in their own type.
        state: The optimizer's after it, by kind and name.
    """

    text: str
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    state: dict[str, dict[str, Tensor]]


def updates(backend: Backend, cases: Sequence[tuple[Resolved, Mapping[str, Tensor]]]) -> list[Update]:
    """The update of each case, from its weights."""
    assert type(backend) is NeuronBackend
    return [_update(backend, *case) for case in cases]


def _update(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor]) -> Update:
    state = start(backend, resolved, weights)
    (batch,) = batches(resolved, 1)
    data = local_batch(state, batch, resolved.config.train.micro_batch)
    backend.step_boundary()
    before = _host(dict(state.model.named_parameters()))
    seen: dict[str, str] = {}

    def meet(graph: str, text: Callable[[], str]) -> None:
        seen.setdefault(graph, text())

    with Runtime(meet, runs=True):
        train_step(state, data, LR)
        backend.step_boundary()
    _, update = seen.values()  # after a micro-batch, which is the same each time
    kept = {kind: _host(tensors) for kind, tensors in state.optimizer.state.items()}
    return Update(update, before, _host(dict(state.model.named_parameters())), kept)


def _host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.detach().cpu() for name, x in tensors.items()}
