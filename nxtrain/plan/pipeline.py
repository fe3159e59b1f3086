"""What a pipeline costs before it runs: step time, bubble, activations in flight, traffic; and a picture of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import fill

from nxtrain.parallel.schedule import Action, Span, num_warmup, play, schedule

_CASES = 2
"""Chunks that capital and small letters tell apart."""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A pipeline and the costs of its virtual stages, each given from the first of them to the last.

    Args:
        pp_size: Ranks.
        virtual_pp: Model chunks of each rank; virtual stage s is chunk `s // pp_size` of rank `s % pp_size`.
        num_micro: Micro-batches of a step.
        forward_s, backward_s: What a micro-batch takes, recomputation included.
        kept_bytes: Activations of a forward that stay until its backward, its input among them.
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
    boundary_bytes: int
    transfer_s: float = 0.0
    blocking: bool = True

    def __post_init__(self) -> None:
        lengths = {len(self.forward_s), len(self.backward_s), len(self.kept_bytes)}
        assert lengths == {self.pp_size * self.virtual_pp}, "one cost for each virtual stage"
        assert min(*self.forward_s, *self.backward_s) > 0, "every stage takes time"

    def play(self) -> tuple[Span, ...]:
        """When each rank does what in a step."""
        actions = schedule(self.pp_size, self.virtual_pp, self.num_micro)
        return play(actions, self.forward_s, self.backward_s, self.transfer_s, blocking=self.blocking)


@dataclass(frozen=True)
class RankFigures:
    """What one rank of a pipeline does in a step.

    Args:
        busy_s: Time that it computes.
        bubble: Share of the step in which it does not.
        forwards_in_flight: Most forwards, of any chunk, whose backward is still to come.
        forwards_in_flight_formula: The same in closed form: one more than the forwards of its warm-up.
        activation_bytes: Most that it holds: what those forwards keep, what was received before its turn, what is
            computed and not sent.
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
        ideal_bubble: What equal stages and free transfers would leave, (p-1)/(m*v+p-1): Narayanan et al. 2021
            (arXiv:2104.04473) section 2.2, as a share of the step.
        ranks: Each rank's.
    """

    step_s: float
    bubble: float
    ideal_bubble: float
    ranks: tuple[RankFigures, ...]


def figures(pipeline: Pipeline, spans: Sequence[Span] = ()) -> PipelineFigures:
    """What a step costs.

    Args:
        pipeline: What is computed.
        spans: When each rank did what, each rank's in order, as it was measured; empty: as `pipeline` plays.
    """
    spans = spans or pipeline.play()
    step_s = _step_s(_computations(spans))
    ranks = tuple(_rank_figures(pipeline, rank, step_s, spans) for rank in range(pipeline.pp_size))
    idle = pipeline.pp_size - 1
    return PipelineFigures(
        step_s=step_s,
        bubble=1 - sum(rank.busy_s for rank in ranks) / (step_s * pipeline.pp_size),
        ideal_bubble=idle / (pipeline.num_micro * pipeline.virtual_pp + idle),
        ranks=ranks,
    )


def _computations(spans: Sequence[Span]) -> list[Span]:
    return [span for span in spans if not span.action.is_transfer]


def _step_s(computations: Sequence[Span]) -> float:
    return max(span.end_s for span in computations) - min(span.start_s for span in computations)


def _rank_figures(pipeline: Pipeline, rank: int, step_s: float, spans: Sequence[Span]) -> RankFigures:
    own = [span for span in spans if span.rank == rank]
    actions = [span.action for span in own]
    busy_s = sum(span.end_s - span.start_s for span in own if not span.action.is_transfer)
    warmup = num_warmup(pipeline.pp_size, pipeline.virtual_pp, pipeline.num_micro, rank)
    sent, received = (sum(action.kind.startswith(verb) for action in actions) for verb in ("send", "receive"))
    return RankFigures(
        busy_s=busy_s,
        bubble=1 - busy_s / step_s,
        forwards_in_flight=_most_in_flight(actions),
        forwards_in_flight_formula=min(pipeline.num_micro * pipeline.virtual_pp, warmup + 1),
        activation_bytes=_most_bytes(pipeline, rank, actions),
        sent_bytes=sent * pipeline.boundary_bytes,
        received_bytes=received * pipeline.boundary_bytes,
    )


def _most_in_flight(actions: Sequence[Action]) -> int:
    now = most = 0
    for action in actions:
        now += {"forward": 1, "backward": -1}.get(action.kind, 0)
        most = max(most, now)
    return most


def _most_bytes(pipeline: Pipeline, rank: int, actions: Sequence[Action]) -> int:
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
        else:
            now += pipeline.boundary_bytes if action.kind.startswith("receive") else -pipeline.boundary_bytes
            most = max(most, now)
    assert now == 0, f"rank {rank} ends its step with {now} bytes of activations"
    return most


def draw(pipeline: Pipeline, width: int = 120) -> str:
    """A step as text, time to the right and a line for each rank, with a legend and the figures.

    Args:
        pipeline: What is drawn.
        width: Columns that there are.
    """
    return "\n".join(
        [timeline(pipeline, width=width), *(_note(pipeline, note, width) for note in _summary(figures(pipeline)))]
    )


def timeline(pipeline: Pipeline, spans: Sequence[Span] = (), width: int = 120) -> str:
    """The lines of the ranks and the legend.

    Columns are as narrow as labels allow. What does not fit is cut off, and the legend says so, since a timeline that
    cannot be read shows nothing.

    Args:
        pipeline: What is drawn.
        spans: As in `figures`.
        width: Columns that there are.
    """
    spans = _computations(spans or pipeline.play())
    begin_s, step_s = min(span.start_s for span in spans), _step_s(spans)
    labels = [_label(span.action, pipeline.virtual_pp) for span in spans]
    columns_per_s = max(map(len, labels)) / min(span.end_s - span.start_s for span in spans)
    lines = [[_head(pipeline, rank), ""] for rank in range(pipeline.pp_size)]
    for span, label in zip(spans, labels, strict=True):
        start, end = (round((at_s - begin_s) * columns_per_s) for at_s in (span.start_s, span.end_s))
        line = lines[span.rank]
        line[1] = line[1].ljust(start, ".") + label[: end - start].ljust(end - start, "-")
    head, all_columns = len(lines[0][0]), round(step_s * columns_per_s)
    columns = min(all_columns, max(1, width - head))
    text = [name + line.ljust(all_columns, ".")[:columns] for name, line in lines]
    notes = [_legend(pipeline)]
    if columns < all_columns:
        shown = _time(step_s * columns / all_columns)
        notes.insert(0, f"the first {shown} of {_time(step_s)}; {head + all_columns} columns would show it all")
    return "\n".join([*text, *(_note(pipeline, note, width) for note in notes)])


def _head(pipeline: Pipeline, rank: int) -> str:
    return f"rank {rank:<{len(str(pipeline.pp_size - 1))}}  "


def _note(pipeline: Pipeline, text: str, width: int) -> str:
    """A line below those of the ranks, where they begin."""
    indent = " " * len(_head(pipeline, 0))
    return fill(text, width, initial_indent=indent, subsequent_indent=indent)


def _label(action: Action, virtual_pp: int) -> str:
    """As an action is written; a second chunk of two in small letters, which take no room."""
    if virtual_pp == _CASES and action.chunk == 1:
        return f"{'f' if action.kind == 'forward' else 'b'}{action.micro}"
    return str(action)


def _legend(pipeline: Pipeline) -> str:
    last = pipeline.num_micro - 1
    text = f"F{last} is the forward and B{last} the backward of micro-batch {last}, dots are time without either"
    if pipeline.virtual_pp == _CASES:
        return f"{text}; small letters: the second chunk of the rank"
    return (
        f"{text}; F{last}.1: chunk 1 of the rank, of 0 to {pipeline.virtual_pp - 1}"
        if pipeline.virtual_pp > 1
        else text
    )


def _summary(figures: PipelineFigures) -> list[str]:
    mib = 1 << 20
    in_flight = " ".join(str(rank.forwards_in_flight) for rank in figures.ranks)
    activations = " ".join(f"{rank.activation_bytes / mib:.4g}" for rank in figures.ranks)
    sent = " ".join(f"{rank.sent_bytes / mib:.4g}" for rank in figures.ranks)
    return [
        f"step {_time(figures.step_s)}, bubble {figures.bubble:.1%} of it (ideal {figures.ideal_bubble:.1%})",
        f"by rank {in_flight} forwards in flight, {activations} MiB of activations, {sent} MiB sent",
    ]


def _time(seconds: float) -> str:
    unit, scale = next((u for u in (("s", 1.0), ("ms", 1e-3)) if seconds >= u[1]), ("us", 1e-6))
    return f"{seconds / scale:.4g} {unit}"
