"""The bubble of a pipeline of equal stages, measured on local processes, beside what its schedule predicts.

The bubble is the share of all ranks' time in which they compute neither forward nor backward. Waiting and transfers are
no computation, and a step lasts from the first forward of any rank to the last backward, on the clock that the
processes of a machine share. What is quoted is the shortest of all rounds, since whatever else the machine does can
only make a step longer.

ZB-H1 is measured in turn with 1F1B, a round of the one after a round of the other.

What stages do is to sleep, unless they are told to compute blocks of a Llama: a machine with fewer cores than stages
can sleep in all of them at once, but not compute.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from statistics import mean
from typing import Any, Literal, TypeAlias

from rich.console import Console
from rich.table import Table

from nxtrain.common.errors import ConfigError
from nxtrain.common.process.document import write_document
from nxtrain.common.process.progress import Progress
from nxtrain.parallel.schedule import Action, Order
from nxtrain.parallel.simulate import Span
from nxtrain.plan.pipeline import PipelineCosts, PipelineFigures, figures
from nxtrain.plan.timeline import timeline
from nxtrain.tools.bench.train import SHAPE
from nxtrain.tools.bench.turns import BenchWorker, num_cores, rank_environments

Work: TypeAlias = Literal["sleep", "blocks"]

MIB = 1 << 20

RANK_PROGRAM = "nxtrain.tools.bench.pipeline_rank"

BACKWARD = 2
"""Ratio of a backward's sleep to a forward's, as for matrix products."""


@dataclass(frozen=True)
class StageWork:
    """Workload of the ranks of a pipeline.

    Args:
        pp: Ranks.
        virtual_pp: Chunks of each.
        schedule: Order of the computations.
        micro: Micro-batches of a step.
        work: Work of a chunk: sleep, or compute blocks.
        forward_s: Sleep of a forward; a backward takes `BACKWARD` times as long, each of its parts half of that.
        layers: Number of blocks of a chunk that computes.
        seq_len: Tokens of a micro-batch; by their hidden states, what is sent.
    """

    pp: int
    virtual_pp: int
    schedule: Order
    micro: int
    work: Work
    forward_s: float
    layers: int
    seq_len: int

    @property
    def boundary_bytes(self) -> int:
        """Size of the float32 hidden states that one stage sends to the next."""
        return 4 * self.seq_len * int(SHAPE["hidden_size"])

    def expected(self, forward_s: float = 0.0, backward_s: float = 0.0, weight_s: float = 0.0) -> PipelineCosts:
        """The pipeline as planned; times other than those of sleep must be given."""
        num_stages = self.pp * self.virtual_pp
        splits = self.schedule == "zero_bubble"
        slept_s = BACKWARD * self.forward_s / (2 if splits else 1)
        return PipelineCosts(
            pp_size=self.pp,
            virtual_pp=self.virtual_pp,
            num_micro=self.micro,
            forward_s=[forward_s or self.forward_s] * num_stages,
            backward_s=[backward_s or slept_s] * num_stages,
            kept_bytes=[self.boundary_bytes * (stage > 0) for stage in range(num_stages)],
            order=self.schedule,
            weight_s=[weight_s or slept_s] * num_stages if splits else (),
            postponed_bytes=[0] * num_stages if splits else (),
            boundary_bytes=self.boundary_bytes,
            blocking=False,
        )


@dataclass(frozen=True)
class PipelineTurn:
    """Measurement of all ranks in one step.

    Args:
        spans: Spans of each rank in order; a transfer's span is the time to start it.
        sent_bytes: Bytes that each rank sent.
    """

    spans: tuple[Span, ...]
    sent_bytes: tuple[int, ...]

    @staticmethod
    def read(lines: Sequence[str]) -> PipelineTurn:
        """From what the processes print, by rank."""
        found = [json.loads(line) for line in lines]
        spans = tuple(
            Span(rank, Action(kind, chunk, micro), start_s, end_s)
            for rank, one in enumerate(found)
            for kind, chunk, micro, start_s, end_s in one["actions"]
        )
        return PipelineTurn(spans, tuple(one["sent_bytes"] for one in found))

    def mean_s(self, kind: str) -> float:
        """Of the forwards, of the backwards, or of their weight parts."""
        return mean([span.end_s - span.start_s for span in self.spans if span.action.kind == kind] or [0.0])


def bench_pipeline(*, work: StageWork, rounds: int, dry_run: bool, as_json: bool) -> None:
    """Measure and print.

    Args:
        work: What is computed.
        rounds: Steps, after one that warms up.
        dry_run: Only print what is expected.
        as_json: Print JSON instead of text.

    Raises:
        ConfigError: There is no such pipeline.
    """
    if work.pp == 1 and (not dry_run or work.virtual_pp > 1):
        raise ConfigError("--pp 1 is no pipeline: a single stage sends nothing and waits for nobody; use 2 or more")
    if work.schedule == "zero_bubble" and work.virtual_pp > 1:
        raise ConfigError(f"--virtual-pp {work.virtual_pp} has no schedule zero_bubble, which is for 1; leave one out")
    works = [work] if work.schedule == "1f1b" else [work, replace(work, schedule="1f1b")]
    turns: list[list[PipelineTurn]] = [[] for _ in works] if dry_run else measure(works, rounds)
    result, *others = (summarize(one, of_one) for one, of_one in zip(works, turns, strict=True))
    if as_json:
        compared = {"1f1b": others[0]} if others else {}
        write_document({**asdict(work), "rounds": rounds, **result, **compared})
    else:
        _show(work, turns[0], result, others)


def measure(works: Sequence[StageWork], rounds: int) -> list[list[PipelineTurn]]:
    """Run the steps of several pipelines in turn, each rank in a process of its own.

    Raises:
        BackendError: A process ended; its output contains the reason.
    """
    turns: list[list[PipelineTurn]] = [[] for _ in works]
    with ExitStack() as stack, Progress("starting", rounds + 1) as progress:
        pipelines = [
            [
                stack.enter_context(BenchWorker(RANK_PROGRAM, str(rank), json.dumps(asdict(work)), env))
                for rank, env in enumerate(rank_environments(work.pp))
            ]
            for work in works
        ]
        for number in range(rounds + 1):
            progress.show(number, f"round {number} of {rounds}")
            for workers, of_one in zip(pipelines, turns, strict=True):
                for worker in workers:
                    worker.begin()
                of_one.append(PipelineTurn.read([worker.end() for worker in workers]))
    return [of_one[1:] for of_one in turns]


def fastest(work: StageWork, turns: Iterable[PipelineTurn]) -> PipelineTurn:
    """The turn with the shortest step."""
    return min(turns, key=lambda turn: figures(work.expected(), turn.spans).step_s)


def summarize(work: StageWork, turns: Sequence[PipelineTurn]) -> dict[str, Any]:
    """Expected figures and, if there are turns, the measured figures of the fastest turn.

    Args:
        work: Workload; for blocks, the expected times are the means of the measured times.
        turns: Turns of all rounds.
    """
    best = fastest(work, turns) if turns else None
    plan = _plan(work, best)
    expected = figures(plan)
    result: dict[str, Any] = {"ideal_bubble": expected.ideal_bubble, "expected": _of(expected)}
    if best is not None:
        result["measured"] = _of(figures(plan, best.spans)) | {"sent_bytes": list(best.sent_bytes)}
        result["bubbles"] = [figures(plan, turn.spans).bubble for turn in turns]
        result["cores"] = num_cores()
    return result


def _of(found: PipelineFigures) -> dict[str, Any]:
    return {
        "step_s": found.step_s,
        "bubble": found.bubble,
        "busy_s": [rank.busy_s for rank in found.ranks],
        "forwards_in_flight": [rank.forwards_in_flight for rank in found.ranks],
        "forwards_in_flight_formula": [rank.forwards_in_flight_formula for rank in found.ranks],
        "held_bytes": [rank.activation_bytes for rank in found.ranks],
        "sent_bytes": [rank.sent_bytes for rank in found.ranks],
    }


def _plan(work: StageWork, best: PipelineTurn | None) -> PipelineCosts:
    if best is None or work.work == "sleep":
        return work.expected()
    return work.expected(*(best.mean_s(kind) for kind in ("forward", "backward", "weight")))


def _show(
    work: StageWork, turns: Sequence[PipelineTurn], result: dict[str, Any], others: Sequence[dict[str, Any]]
) -> None:
    best = fastest(work, turns) if turns else None
    plan = _plan(work, best)
    console = Console(highlight=False, soft_wrap=True)
    width = console.width if console.is_terminal else 120
    pictures = {"expected": timeline(plan, width=width)}
    if best:
        pictures["measured"] = timeline(plan, best.spans, width)
    for name, picture in pictures.items():
        console.print(f"{name}:", style="bold")
        console.print(f"{picture}\n", markup=False)
    console.print(_table(work, result))
    for other in others:
        console.print(_comparison(result, other))
    if best and work.work == "blocks" and result["cores"] < work.pp:
        console.print(
            f"{work.pp} ranks share {result['cores']} cores, so they wait for these and not for each other: this "
            "bubble says nothing of the schedule; use --work sleep, or as many cores as ranks",
            style="yellow",
        )


def _comparison(result: dict[str, Any], other: dict[str, Any]) -> str:
    """Bubble and step time of 1F1B: expected and, if measured in turn with the other schedule, measured."""
    names = [name for name in ("expected", "measured") if name in other]
    bubble = " / ".join(f"{other[name]['bubble']:.1%}" for name in names)
    step = " / ".join(f"{1e3 * other[name]['step_s']:.1f}" for name in names)
    saved = " / ".join(f"{1 - result[name]['step_s'] / other[name]['step_s']:.1%}" for name in names)
    return f"1f1b for comparison: bubble {bubble}, step {step} ms; zero_bubble saves {saved} of that"


def _table(work: StageWork, result: dict[str, Any]) -> Table:
    shown = [result[name] for name in ("expected", "measured") if name in result]

    def cell(numbers: Sequence[float], form: str) -> str:
        return " / ".join(f"{number:{form}}" for number in numbers)

    title = f"{work.schedule}, pp {work.pp}, virtual pp {work.virtual_pp}, {work.micro} micro-batches: bubble "
    title += f"{cell([found['bubble'] for found in shown], '.1%')}, ideal {result['ideal_bubble']:.1%}"
    table = Table(title=title, title_style="bold")
    for head in ("rank", "busy ms", "idle ms", "forwards in flight", "MiB held", "MiB sent"):
        table.add_column(head, justify="right")
    for rank in range(work.pp):
        busy_ms = [1e3 * found["busy_s"][rank] for found in shown]
        idle_ms = [1e3 * found["step_s"] - busy for found, busy in zip(shown, busy_ms, strict=True)]
        table.add_row(
            str(rank),
            cell(busy_ms, ".1f"),
            cell(idle_ms, ".1f"),
            cell([found["forwards_in_flight"][rank] for found in shown], "d"),
            *(cell([found[name][rank] / MIB for found in shown], ".3g") for name in ("held_bytes", "sent_bytes")),
        )
    caption = "held: the most at once of what stages send each other"
    if "bubbles" in result:
        bubbles = " ".join(f"{bubble:.1%}" for bubble in result["bubbles"])
        caption += f"; expected / measured, in the shortest step of {len(result['bubbles'])} with bubbles {bubbles}"
    table.caption = caption
    return table
