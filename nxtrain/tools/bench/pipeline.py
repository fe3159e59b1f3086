"""Benchmark of the pipeline bubble with equal stages, compared with the schedule's prediction.

The bubble is the share of all ranks' time in which they compute neither forward nor backward. Waits and transfers do
not count as computation. A step lasts from the first forward of any rank to the last backward. All processes of a
machine share the clock. The result is the shortest step of all rounds, since other load can only make a step longer.

Rounds of ZB-H1 and of 1F1B alternate.

Each rank is a local process. On CPUs its stage sleeps in place of computing, since a machine may have fewer cores than
stages. On a device each stage multiplies matrices for the same time, and events of the device measure start and end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from nxtrain.common.errors import ConfigError
from nxtrain.common.process.document import write_document
from nxtrain.launch.threads import num_cores
from nxtrain.parallel.schedule import Action, Order
from nxtrain.parallel.simulate import Span
from nxtrain.plan.pipeline import PipelineCosts, PipelineFigures, figures
from nxtrain.plan.timeline import timeline
from nxtrain.tools.bench.harness import measure_concurrently, start_ranks, table, take_turns
from nxtrain.tools.bench.train import SHAPE, check_backend

MIB = 1 << 20

BACKWARD = 2  # duration of a backward in units of a forward, as for matrix products


@dataclass(frozen=True)
class StageWork:
    """Workload of a pipeline benchmark: degrees, schedule, micro-batches and duration of a stage."""

    pp: int
    virtual_pp: int
    schedule: Order
    micro: int  # micro-batches of a step
    forward_s: float  # duration of a forward; a backward takes `BACKWARD` times as long, each split part half of that
    seq_len: int  # tokens of a micro-batch, whose hidden states stages send
    backend: str = "cpu"

    @property
    def boundary_bytes(self) -> int:
        """Bytes of the float32 hidden states that one stage sends to the next per micro-batch."""
        return 4 * self.seq_len * int(SHAPE["hidden_size"])

    def expected(self) -> PipelineCosts:
        """Costs of each pipeline stage, from which the schedule's bubble is predicted."""
        num_stages = self.pp * self.virtual_pp
        backward_s = BACKWARD * self.forward_s
        weights_s: list[float] = []
        postponed_bytes: list[int] = []
        if self.schedule == "zero_bubble":
            backward_s /= 2
            weights_s = [backward_s] * num_stages
            postponed_bytes = [0] * num_stages
        return PipelineCosts(
            pp_size=self.pp,
            virtual_pp=self.virtual_pp,
            num_micro=self.micro,
            forward_s=[self.forward_s] * num_stages,
            backward_s=[backward_s] * num_stages,
            kept_bytes=[self.boundary_bytes * (stage > 0) for stage in range(num_stages)],
            order=self.schedule,
            weight_s=weights_s,
            postponed_bytes=postponed_bytes,
            boundary_bytes=self.boundary_bytes,
            blocking=False,
        )


@dataclass(frozen=True)
class PipelineTurn:
    """Measured spans and sent bytes of all ranks in one step."""

    spans: tuple[Span, ...]  # spans of each rank in order; a transfer's span is the time to start it
    sent_bytes: tuple[int, ...]

    @staticmethod
    def read(answers: Sequence[Mapping[str, Any]]) -> PipelineTurn:
        """Build a measurement from the JSON results of the worker processes, in rank order."""
        spans, sent_bytes = [], []
        for rank, answer in enumerate(answers):
            for kind, chunk, micro, start_s, end_s in answer["actions"]:
                spans.append(Span(rank, Action(kind, chunk, micro), start_s, end_s))
            sent_bytes.append(answer["sent_bytes"])
        return PipelineTurn(tuple(spans), tuple(sent_bytes))


def bench_pipeline(*, work: StageWork, rounds: int, dry_run: bool, as_json: bool) -> None:
    """Measure the bubble of a pipeline and print the results.

    Args:
        dry_run: Print the schedule's prediction only.

    Raises:
        ConfigError: The degrees and the schedule do not fit together.
    """
    if work.pp == 1 and (not dry_run or work.virtual_pp > 1):
        raise ConfigError("--pp 1 is not a pipeline: a single stage has no other stage to wait for; use 2 or more")
    if work.schedule == "zero_bubble" and work.virtual_pp > 1:
        raise ConfigError(
            f"schedule zero_bubble needs --virtual-pp 1, not {work.virtual_pp}; choose one of the two options"
        )
    works = [work]
    if work.schedule != "1f1b":
        works.append(replace(work, schedule="1f1b"))
    turns: list[list[PipelineTurn]] = [[] for _ in works]
    devices = ""
    if not dry_run:
        devices = check_backend(work.backend, eager=True)
        turns = measure(works, rounds)
    result, *others = (summarize(one, of_one) for one, of_one in zip(works, turns, strict=True))
    if as_json:
        document = {**asdict(work), "devices": devices, "rounds": rounds, **result}
        if others:
            document["1f1b"] = others[0]
        write_document(document)
    else:
        if devices:
            print(devices)
        _show(work, turns[0], result, others)


def measure(works: Sequence[StageWork], rounds: int) -> list[list[PipelineTurn]]:
    """Measure steps of several pipeline workloads alternately, with one process per rank."""
    with ExitStack() as stack:
        sides: dict[str, Callable[[], list[Any]]] = {}
        for work in works:
            ranks = start_ranks(stack, "pipeline_rank", work.schedule, asdict(work), work.pp)
            sides[work.schedule] = partial(measure_concurrently, ranks)
        measured = take_turns(sides, rounds)
    turns = []
    for work in works:
        turns.append([PipelineTurn.read(answers) for answers in measured[work.schedule]])
    return turns


def fastest(work: StageWork, turns: Iterable[PipelineTurn]) -> PipelineTurn:
    """Return the pipeline measurement with the shortest step."""
    return min(turns, key=lambda turn: figures(work.expected(), turn.spans).step_s)


def summarize(work: StageWork, turns: Sequence[PipelineTurn]) -> dict[str, Any]:
    """Predicted figures and, if there are measurements, the figures of the shortest measured step."""
    plan = work.expected()
    expected = figures(plan)
    result: dict[str, Any] = {"ideal_bubble": expected.ideal_bubble, "expected": _of(expected)}
    if turns:
        best = fastest(work, turns)
        result["measured"] = _of(figures(plan, best.spans)) | {"sent_bytes": list(best.sent_bytes)}
        result["bubbles"] = [figures(plan, turn.spans).bubble for turn in turns]
        result["cores"] = num_cores()
    return result


def _of(pipeline: PipelineFigures) -> dict[str, Any]:
    return {
        "step_s": pipeline.step_s,
        "bubble": pipeline.bubble,
        "busy_s": [rank.busy_s for rank in pipeline.ranks],
        "forwards_in_flight": [rank.forwards_in_flight for rank in pipeline.ranks],
        "forwards_in_flight_formula": [rank.forwards_in_flight_formula for rank in pipeline.ranks],
        "held_bytes": [rank.activation_bytes for rank in pipeline.ranks],
        "sent_bytes": [rank.sent_bytes for rank in pipeline.ranks],
    }


def _show(
    work: StageWork, turns: Sequence[PipelineTurn], result: dict[str, Any], others: Sequence[dict[str, Any]]
) -> None:
    plan = work.expected()
    console = Console(highlight=False, soft_wrap=True)
    width = console.width if console.is_terminal else 120
    pictures = {"expected": timeline(plan, width=width)}
    if turns:
        pictures["measured"] = timeline(plan, fastest(work, turns).spans, width)
    for name, picture in pictures.items():
        console.print(f"{name}:", style="bold")
        console.print(f"{picture}\n", markup=False)
    console.print(_table(work, result))
    for other in others:
        # The expected figure and, if there is one, the measured figure.
        names = [name for name in ("expected", "measured") if name in other]
        bubble = " / ".join(f"{other[name]['bubble']:.1%}" for name in names)
        step = " / ".join(f"{1e3 * other[name]['step_s']:.1f}" for name in names)
        saved = " / ".join(f"{1 - result[name]['step_s'] / other[name]['step_s']:.1%}" for name in names)
        console.print(f"1f1b for comparison: bubble {bubble}, step {step} ms; zero_bubble saves {saved} of that")


def _table(work: StageWork, result: dict[str, Any]) -> Table:
    shown = [result[name] for name in ("expected", "measured") if name in result]

    def cell(numbers: Sequence[float], form: str) -> str:
        return " / ".join(f"{number:{form}}" for number in numbers)

    title = f"{work.schedule}, pp {work.pp}, virtual pp {work.virtual_pp}, {work.micro} micro-batches: bubble "
    title += f"{cell([pipeline['bubble'] for pipeline in shown], '.1%')}, ideal {result['ideal_bubble']:.1%}"
    rows = []
    for rank in range(work.pp):
        busy_ms = [1e3 * pipeline["busy_s"][rank] for pipeline in shown]
        idle_ms = [1e3 * pipeline["step_s"] - busy for pipeline, busy in zip(shown, busy_ms, strict=True)]
        in_flight = [pipeline["forwards_in_flight"][rank] for pipeline in shown]
        held_mib = [pipeline["held_bytes"][rank] / MIB for pipeline in shown]
        sent_mib = [pipeline["sent_bytes"][rank] / MIB for pipeline in shown]
        times = (cell(busy_ms, ".1f"), cell(idle_ms, ".1f"))
        rows.append((str(rank), *times, cell(in_flight, "d"), cell(held_mib, ".3g"), cell(sent_mib, ".3g")))
    caption = "held: the most at once of what stages send each other"
    if "bubbles" in result:
        bubbles = " ".join(f"{bubble:.1%}" for bubble in result["bubbles"])
        caption += f"; expected / measured, in the shortest step of {len(result['bubbles'])} with bubbles {bubbles}"
    heads = ("rank", "busy ms", "idle ms", "forwards in flight", "MiB held", "MiB sent")
    return table(title, heads, rows, caption)
