"""Predicted costs of pipeline parallelism: step time, bubble, activations in flight, and traffic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from nxtrain.parallel.schedule import Action, Order, num_warmup, schedule
from nxtrain.parallel.simulate import Span, simulate


@dataclass(frozen=True, kw_only=True)
class PipelineCosts:
    """Pipeline and the costs of its virtual stages, each listed from the first virtual stage to the last.

    Args:
        pp_size: Number of pipeline ranks.
        virtual_pp: Model chunks of each rank; virtual stage s is chunk `s // pp_size` of rank `s % pp_size`.
        num_micro: Micro-batches of a step.
        forward_s, backward_s: Seconds of a micro-batch's forward and backward, recomputation included.
        kept_bytes: Bytes of activations kept from a forward until its backward, the forward's input included.
        order: Order of the computations; with `zero_bubble`, `backward_s` excludes the weight part.
        weight_s: With `zero_bubble`, seconds of the weight part.
        postponed_bytes: With `zero_bubble`, bytes kept from a backward to its weight part: the input and the output
            gradient of every linear layer.
        boundary_bytes: Bytes of the tensor that one stage sends to the next; its gradient is as large.
        transfer_s: Seconds to send the tensor.
        blocking: True if a transfer keeps both ranks busy and waiting for each other.
    """

    pp_size: int
    virtual_pp: int = 1
    num_micro: int
    forward_s: Sequence[float]
    backward_s: Sequence[float]
    kept_bytes: Sequence[int]
    order: Order = "1f1b"
    weight_s: Sequence[float] = ()
    postponed_bytes: Sequence[int] = ()
    boundary_bytes: int
    transfer_s: float = 0.0
    blocking: bool = True

    def __post_init__(self) -> None:
        costs: list[Sequence[float]] = [self.forward_s, self.backward_s, self.kept_bytes]
        if self.order == "zero_bubble":
            costs += [self.weight_s, self.postponed_bytes]
        lengths = {len(cost) for cost in costs}
        assert lengths == {self.pp_size * self.virtual_pp}, "one cost for each virtual stage"
        assert min(*self.forward_s, *self.backward_s, *self.weight_s) > 0, "times must be positive"

    def play(self) -> tuple[Span, ...]:
        """Simulate the schedule of a step and return the time spans of all actions."""
        actions = schedule(self.pp_size, self.virtual_pp, self.num_micro, self.order)
        costs = self.forward_s, self.backward_s, self.transfer_s
        return simulate(actions, *costs, weight_s=self.weight_s, blocking=self.blocking)

    @property
    def ideal_bubble(self) -> float:
        """Bubble with equal stages and free transfers, as a share of the step, for at least `pp_size` micro-batches.

        Source: Narayanan et al. 2021 (arXiv:2104.04473) section 2.2: (p-1)/(m*v+p-1). Qi et al. 2024 (arXiv:2401.10241)
        section 2.3 for ZB-H1: each rank waits (p-1)*(F+B-W), but at least for p-1 forwards, since the last rank does.
        """
        idle = self.pp_size - 1
        if self.order == "1f1b":
            return idle / (self.num_micro * self.virtual_pp + idle)
        forward_s, backward_s, weight_s = (mean(cost) for cost in (self.forward_s, self.backward_s, self.weight_s))
        idle_s = idle * (forward_s + max(0.0, backward_s - weight_s))
        return idle_s / (self.num_micro * (forward_s + backward_s + weight_s) + idle_s)

    def in_flight(self, rank: int) -> int:
        """Most forwards of a rank, of any chunk, that await their backward, weight part included."""
        warmup = num_warmup(self.pp_size, self.virtual_pp, self.num_micro, rank)
        postponed = rank if self.order == "zero_bubble" else 0
        return min(self.num_micro * self.virtual_pp, warmup + 1 + postponed)


@dataclass(frozen=True)
class RankFigures:
    """Predicted or measured figures of one pipeline rank in a step.

    Args:
        busy_s: Seconds of the rank's computations.
        bubble: Share of the step without computation.
        forwards_in_flight: Most forwards, of any chunk, that await their backward or its weight part.
        forwards_in_flight_formula: The same number in closed form: the rank's warm-up forwards plus one; with
            `zero_bubble` p on every rank.
        activation_bytes: Peak of the activations held: kept by forwards, postponed by backwards, received early, or
            computed and not yet sent. Not included are up to three boundary tensors, for any number of micro-batches:
            the last tensor sent in each direction, and the template for received tensors.
        sent_bytes, received_bytes: Bytes of activations and gradients; equal, since each sent tensor has a received
            gradient.
    """

    busy_s: float
    bubble: float
    forwards_in_flight: int
    forwards_in_flight_formula: int
    activation_bytes: int
    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True)
class PipelineFigures:
    """Predicted or measured figures of a pipeline in a step.

    Args:
        step_s: Seconds from the start of the first forward to the end of the last backward.
        bubble: Share of all ranks' time without computation.
        ideal_bubble: Bubble with equal stages and free transfers.
        ranks: Figures of each rank.
    """

    step_s: float
    bubble: float
    ideal_bubble: float
    ranks: tuple[RankFigures, ...]


def figures(pipeline: PipelineCosts, spans: Sequence[Span] = ()) -> PipelineFigures:
    """Compute the figures of a pipeline step, from simulated or measured time spans.

    Args:
        pipeline: Pipeline with its costs.
        spans: Measured spans, in order for each rank; if empty, `pipeline.play` simulates them.
    """
    spans = spans or pipeline.play()
    step_s = elapsed_s(computations(spans))
    ranks = tuple(_rank_figures(pipeline, rank, step_s, spans) for rank in range(pipeline.pp_size))
    return PipelineFigures(
        step_s=step_s,
        bubble=1 - sum(rank.busy_s for rank in ranks) / (step_s * pipeline.pp_size),
        ideal_bubble=pipeline.ideal_bubble,
        ranks=ranks,
    )


def computations(spans: Sequence[Span]) -> list[Span]:
    """Select the time spans of computations, without those of transfers."""
    return [span for span in spans if not span.action.is_transfer]


def elapsed_s(computations: Sequence[Span]) -> float:
    """Seconds from the start of the first computation to the end of the last."""
    return max(span.end_s for span in computations) - min(span.start_s for span in computations)


def _rank_figures(pipeline: PipelineCosts, rank: int, step_s: float, spans: Sequence[Span]) -> RankFigures:
    own = [span for span in spans if span.rank == rank]
    actions = [span.action for span in own]
    busy_s = sum(span.end_s - span.start_s for span in own if not span.action.is_transfer)
    sent = sum(action.kind.startswith("send") for action in actions)
    received = sum(action.kind.startswith("receive") for action in actions)
    end = "weight"
    if pipeline.order == "1f1b":
        end = "backward"
    in_flight = most_in_flight = 0
    for action in actions:
        in_flight += (action.kind == "forward") - (action.kind == end)
        most_in_flight = max(most_in_flight, in_flight)
    return RankFigures(
        busy_s=busy_s,
        bubble=1 - busy_s / step_s,
        forwards_in_flight=most_in_flight,
        forwards_in_flight_formula=pipeline.in_flight(rank),
        activation_bytes=_most_bytes(pipeline, rank, actions),
        sent_bytes=sent * pipeline.boundary_bytes,
        received_bytes=received * pipeline.boundary_bytes,
    )


def _most_bytes(pipeline: PipelineCosts, rank: int, actions: Sequence[Action]) -> int:
    now = most = 0
    last = pipeline.pp_size * pipeline.virtual_pp - 1
    for action in actions:
        stage = action.chunk * pipeline.pp_size + rank
        # Tensor received from another stage, and tensor made for another stage.
        comes = pipeline.boundary_bytes * (stage > 0 if action.kind == "forward" else stage < last)
        goes = pipeline.boundary_bytes * (stage < last if action.kind == "forward" else stage > 0)
        if action.kind == "forward":  # keeps its input
            now += pipeline.kept_bytes[stage] - comes + goes
            most = max(most, now)
        elif action.kind == "backward":
            now += goes
            most = max(most, now)
            now -= pipeline.kept_bytes[stage] + comes
            now += pipeline.postponed_bytes[stage] if pipeline.order == "zero_bubble" else 0
            most = max(most, now)
        elif action.kind == "weight":
            now -= pipeline.postponed_bytes[stage]
        else:
            now += pipeline.boundary_bytes if action.kind.startswith("receive") else -pipeline.boundary_bytes
            most = max(most, now)
    assert now == 0, f"rank {rank} ends its step with {now} bytes of activations"
    return most
