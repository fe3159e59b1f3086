"""What a pipeline costs before it runs: step time, bubble, activations in flight, traffic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from nxtrain.parallel.schedule import Action, Kind, Order, num_warmup, schedule
from nxtrain.parallel.simulate import Span, play


@dataclass(frozen=True, kw_only=True)
class PipelineCosts:
    """A pipeline and the costs of its virtual stages, each given from the first of them to the last.

    Args:
        pp_size: Ranks.
        virtual_pp: Model chunks of each rank; virtual stage s is chunk `s // pp_size` of rank `s % pp_size`.
        num_micro: Micro-batches of a step.
        forward_s, backward_s: What a micro-batch takes, recomputation included.
        kept_bytes: Activations of a forward that stay until its backward, its input among them.
        order: Of the computations; with `zero_bubble`, `backward_s` lacks the weight part.
        weight_s: With `zero_bubble`, what that takes.
        postponed_bytes: With `zero_bubble`, what stays from a backward to its weight part: of every linear layer what
            entered it and the gradient of what left it.
        boundary_bytes: The tensor that one stage sends to the next; its gradients are as large.
        transfer_s: What sending it takes.
        blocking: Whether that keeps both ranks busy, and waiting for each other.
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
        assert min(*self.forward_s, *self.backward_s, *self.weight_s) > 0, "every stage takes time"

    def play(self) -> tuple[Span, ...]:
        """When each rank does what in a step."""
        actions = schedule(self.pp_size, self.virtual_pp, self.num_micro, self.order)
        costs = self.forward_s, self.backward_s, self.transfer_s
        return play(actions, *costs, weight_s=self.weight_s, blocking=self.blocking)

    @property
    def ideal_bubble(self) -> float:
        """Share of the step that ranks must wait, were stages equal and transfers free, with p micro-batches or more.

        Source: Narayanan et al. 2021 (arXiv:2104.04473) section 2.2: (p-1)/(m*v+p-1). Qi et al. 2024 (arXiv:2401.10241)
        section 2.3 for ZB-H1: each rank waits (p-1)*(F+B-W); but at least for p-1 forwards, since the last does.
        """
        idle = self.pp_size - 1
        if self.order == "1f1b":
            return idle / (self.num_micro * self.virtual_pp + idle)
        forward_s, backward_s, weight_s = (mean(cost) for cost in (self.forward_s, self.backward_s, self.weight_s))
        idle_s = idle * (forward_s + max(0.0, backward_s - weight_s))
        return idle_s / (self.num_micro * (forward_s + backward_s + weight_s) + idle_s)

    def in_flight(self, rank: int) -> int:
        """Most forwards of a rank, of any chunk, whose backward is not yet done, weight part included."""
        warmup = num_warmup(self.pp_size, self.virtual_pp, self.num_micro, rank)
        postponed = rank if self.order == "zero_bubble" else 0
        return min(self.num_micro * self.virtual_pp, warmup + 1 + postponed)


@dataclass(frozen=True)
class RankFigures:
    """What one rank of a pipeline does in a step.

    Args:
        busy_s: Time that it computes.
        bubble: Share of the step in which it does not.
        forwards_in_flight: Most forwards, of any chunk, whose backward is still to come, or its weight part.
        forwards_in_flight_formula: The same in closed form: one more than the forwards of its warm-up; with
            `zero_bubble` p on every rank.
        activation_bytes: Most that it holds: what those forwards keep, or their backwards have postponed, what was
            received before its turn, what is computed and not sent. Up to three tensors of the boundary come on top,
            however many micro-batches there are: the last sent each way, until the next, and the one that received
            tensors are shaped like.
        sent_bytes, received_bytes: Activations and gradients; equal, since what goes one way comes back as gradients.
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
    """What a pipeline does in a step.

    Args:
        step_s: From the first forward to the last backward.
        bubble: Share of all ranks' time in which they do not compute.
        ideal_bubble: What equal stages and free transfers would leave.
        ranks: Each rank's.
    """

    step_s: float
    bubble: float
    ideal_bubble: float
    ranks: tuple[RankFigures, ...]


def figures(pipeline: PipelineCosts, spans: Sequence[Span] = ()) -> PipelineFigures:
    """What a step costs.

    Args:
        pipeline: What is computed.
        spans: When each rank did what, each rank's in order, as it was measured; empty: as `pipeline` plays.
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
    """The forwards and backwards, whole or in parts."""
    return [span for span in spans if not span.action.is_transfer]


def elapsed_s(computations: Sequence[Span]) -> float:
    """From the first of them to the last."""
    return max(span.end_s for span in computations) - min(span.start_s for span in computations)


def _rank_figures(pipeline: PipelineCosts, rank: int, step_s: float, spans: Sequence[Span]) -> RankFigures:
    own = [span for span in spans if span.rank == rank]
    actions = [span.action for span in own]
    busy_s = sum(span.end_s - span.start_s for span in own if not span.action.is_transfer)
    sent, received = (sum(action.kind.startswith(verb) for action in actions) for verb in ("send", "receive"))
    return RankFigures(
        busy_s=busy_s,
        bubble=1 - busy_s / step_s,
        forwards_in_flight=_most_in_flight(actions, "backward" if pipeline.order == "1f1b" else "weight"),
        forwards_in_flight_formula=pipeline.in_flight(rank),
        activation_bytes=_most_bytes(pipeline, rank, actions),
        sent_bytes=sent * pipeline.boundary_bytes,
        received_bytes=received * pipeline.boundary_bytes,
    )


def _most_in_flight(actions: Sequence[Action], end: Kind) -> int:
    now = most = 0
    for action in actions:
        now += (action.kind == "forward") - (action.kind == end)
        most = max(most, now)
    return most


def _most_bytes(pipeline: PipelineCosts, rank: int, actions: Sequence[Action]) -> int:
    now = most = 0
    last = pipeline.pp_size * pipeline.virtual_pp - 1
    for action in actions:
        stage = action.chunk * pipeline.pp_size + rank
        # A tensor that another stage made for this one, and one that this makes for another.
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
