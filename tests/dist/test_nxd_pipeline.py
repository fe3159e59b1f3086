"""The pipeline of NeuronX Distributed, shown in its own code: its schedules, and where it is wrong or refuses."""

from __future__ import annotations

import importlib.util
import types
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from nxtrain.backends.base import Backend
from tests.support.ranks import RankPool

Kind = Literal["forward", "backward", "send_forward", "receive_forward", "send_backward", "receive_backward"]

_KINDS: dict[str, Kind] = {
    "ForwardStepTask": "forward",
    "BackwardStepTask": "backward",
    "ForwardPreprocessTask": "receive_forward",
    "ForwardPostprocessTask": "send_forward",
    "BackwardPreprocessTask": "receive_backward",
    "BackwardPostprocessTask": "send_backward",
}


class Action(NamedTuple):
    """One thing that a rank does."""

    kind: Kind
    chunk: int
    micro: int


def actions(num_ranks: int, num_micro: int, rank: int, num_chunks: int = 1) -> list[Action]:
    """Actions of a rank in a step, in the order of `NxDPPModel`.

    Its 1F1B receives as late and sends as early as it can; its interleaved schedule sends and receives after each
    computation, in an order that depends on whether there are as many micro-batches as ranks.

    Source: neuronx_distributed/pipeline/scheduler.py; create_schedule and _exec_schedule of pipeline/model.py.
    """
    scheduler = _scheduler()
    if num_chunks == 1:
        schedule = scheduler.Train1F1BSchedule(num_micro, num_ranks, rank)
    else:
        schedule = scheduler.TrainInterleavedSchedule(
            num_micro, num_chunks, num_ranks, rank, use_odd_even_scheduler=num_micro == num_ranks
        )
    tasks = [task for step in schedule.steps() for task in step if type(task).__name__ in _KINDS]
    said = [Action(_KINDS[type(task).__name__], task.model_chunk, task.mb) for task in tasks]
    # Before its first stage it fetches the batch, and behind its last it returns, where others receive and send.
    return [action for action in said if is_compute(action) or _exists(action, rank, num_ranks, num_chunks)]


def is_compute(action: Action) -> bool:
    """True if nothing is moved."""
    return action.kind in ("forward", "backward")


def _exists(action: Action, rank: int, num_ranks: int, num_chunks: int) -> bool:
    stage = action.chunk * num_ranks + rank
    if action.kind in ("receive_forward", "send_backward"):
        return stage > 0
    return stage < num_chunks * num_ranks - 1


@cache
def _scheduler() -> Any:
    """The module alone: it needs nothing, where its package needs torch-xla."""
    package = importlib.util.find_spec("neuronx_distributed")
    assert package is not None and package.origin is not None
    source = Path(package.origin).parent / "pipeline" / "scheduler.py"
    module = types.ModuleType("nxd_scheduler")
    exec(compile(source.read_text(encoding="utf-8"), str(source), "exec"), vars(module))
    return module


pytestmark = pytest.mark.nxd

ROWS, IN, HIDDEN = 4, 6, 5


def schedules(ranks: int, micro: int, chunks: int) -> list[list[Action]]:
    return [actions(ranks, micro, rank, chunks) for rank in range(ranks)]


class First(nn.Module):
    """First layer, which gets a list from the pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, IN * HIDDEN).reshape(HIDDEN, IN))

    def forward(self, inputs: list[Tensor]) -> Tensor:
        return (inputs[0] @ self.weight.T).tanh()


class Last(nn.Module):
    """Uses its matrix the other way round, as a head does."""

    def __init__(self, wrapped: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, IN * HIDDEN).reshape(HIDDEN, IN))
        self.wrapped = wrapped

    def forward(self, x: Tensor) -> Any:
        return (x @ self.weight,) if self.wrapped else x @ self.weight


def per_row(result: Tensor, labels: Tensor) -> Tensor:
    """Mean over the rows that are not ignored."""
    valid = (labels[:, 0] >= 0).float()
    return ((result - labels).square().mean(1) * valid).sum() / valid.sum()


def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, IN, generator=draw), torch.rand(ROWS, IN, generator=draw)


def piped(
    backend: Backend, labels: Tensor, tied: bool = False, wrapped: bool = True, virtual_pp: int = 1
) -> tuple[float, dict[str, Tensor], float]:
    """Loss, gradients of this rank and their norm, of two layers on two ranks."""
    from neuronx_distributed.parallel_layers import parallel_state
    from neuronx_distributed.parallel_layers.grads import get_grad_norm
    from neuronx_distributed.pipeline import NxDPPModel
    from neuronx_distributed.pipeline.manual_pipe_stage import PipelineStageModule

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=backend.world)
    try:
        layers = [First(), Last(wrapped)]
        if tied:
            PipelineStageModule.mark_weight_sharing([(layer, "weight") for layer in layers], "matrix")
        model = NxDPPModel(
            layers,
            manual_pp_partition=True,
            manual_pp_loss_fn=per_row,
            num_microbatches=2,
            virtual_pipeline_size=virtual_pp,
            broadcast_and_average_loss=True,
        )
        loss = model.run_train(inputs=batch()[0], labels=labels)
        grads = {name.rpartition(".")[2]: p.grad.clone() for name, p in model.local_named_parameters()}
        return loss.item(), grads, get_grad_norm(list(model.local_parameters())).item()
    finally:
        parallel_state.destroy_model_parallel()


def alone(labels: Tensor, loss: Callable[[Tensor, Tensor], Tensor], tied: bool = False) -> tuple[float, list[Tensor]]:
    """Loss and gradients of both layers on the whole batch, without a pipeline."""
    first, last = First(), Last()
    if tied:
        last.weight = first.weight
    result = loss(last(first([batch()[0]]))[0], labels)
    result.backward()
    return result.item(), [p.grad for p in dict.fromkeys([first.weight, last.weight]) if p.grad is not None]


def test_an_untied_pipeline_has_the_loss_the_gradients_and_the_norm_of_the_whole(nxd_ranks: RankPool) -> None:
    labels = batch()[1]
    loss, grads = alone(labels, per_row)
    norm = torch.stack([grad.norm() for grad in grads]).norm().item()
    for (result, mine, found_norm), grad in zip(nxd_ranks.run(2, piped, labels), grads, strict=True):
        assert result == pytest.approx(loss, rel=1e-6)
        torch.testing.assert_close(mine["weight"], grad)
        assert found_norm == pytest.approx(norm, rel=1e-6)


def test_nxd_4_14_the_manual_partition_sums_a_tied_gradient_but_counts_it_twice_in_the_norm(
    nxd_ranks: RankPool,
) -> None:
    labels = batch()[1]
    loss, (grad,) = alone(labels, per_row, tied=True)
    for result, mine, norm in nxd_ranks.run(2, piped, labels, True):
        assert result == pytest.approx(loss, rel=1e-6)
        torch.testing.assert_close(mine["weight"], grad)
        assert norm == pytest.approx(grad.norm().item() * 2**0.5, rel=1e-6)  # right: without the root of two


def test_nxd_4_15_micro_batches_with_fewer_tokens_count_as_much_as_full_ones(nxd_ranks: RankPool) -> None:
    labels = batch()[1]
    labels[0] = -1  # of two rows in the first of two micro-batches, one is left
    loss, grads = alone(labels, per_row)
    wrong, wrong_grads = alone(labels, lambda a, b: (per_row(a[:2], b[:2]) + per_row(a[2:], b[2:])) / 2)
    assert wrong != pytest.approx(loss, rel=1e-2)
    for (result, mine, _), grad, wrong_grad in zip(nxd_ranks.run(2, piped, labels), grads, wrong_grads, strict=True):
        assert result == pytest.approx(wrong, rel=1e-6)
        torch.testing.assert_close(mine["weight"], wrong_grad)
        assert (mine["weight"] - grad).norm() > 0.01 * grad.norm()


def test_nxd_4_16_a_last_layer_that_returns_a_tensor_is_trained_on_its_first_row_alone(nxd_ranks: RankPool) -> None:
    labels = batch()[1]
    _, grads = alone(labels, per_row)

    def first_rows(result: Tensor, labels: Tensor) -> Tensor:
        return (per_row(result[:1], labels[:2]) + per_row(result[2:3], labels[2:])) / 2

    wrong, wrong_grads = alone(labels, first_rows)
    both = nxd_ranks.run(2, piped, labels, False, False)
    for (result, mine, _), grad, wrong_grad in zip(both, grads, wrong_grads, strict=True):
        assert result == pytest.approx(wrong, rel=1e-6)
        torch.testing.assert_close(mine["weight"], wrong_grad)
        assert (mine["weight"] - grad).norm() > 0.1 * grad.norm()
