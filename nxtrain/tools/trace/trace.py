"""Tracing process of `nxtrain graphs`: records the graphs of some ranks of a world, one rank after the other.

python -m nxtrain.tools.trace.trace JOB
"""

from __future__ import annotations

# isort: off
# The garbage collector is slowed down before the imports, which take seconds and create no garbage.
from nxtrain.common.process import garbage

if __name__ == "__main__":
    garbage.collect_rarely()
# isort: on

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nxtrain.backends.base import Backend, Binding
from nxtrain.backends.neuron.hardware import INSTANCES
from nxtrain.backends.xla.tracing import TracingBackend, simulated_nxd
from nxtrain.common.errors import BackendError
from nxtrain.common.mesh import Axis, Mesh
from nxtrain.common.process.console import standard_error
from nxtrain.common.sharding import ParamTable
from nxtrain.config.check import Resolved, resolve_config
from nxtrain.config.load import load
from nxtrain.metrics.run_observer import RunObserver, Work
from nxtrain.optim.schedule import Schedule
from nxtrain.parallel.schedule import Action
from nxtrain.tools.trace.hlo import Groups, HloGraph, parse
from nxtrain.tools.trace.recording import Cut, Read, Recording
from nxtrain.tools.trace.report import report
from nxtrain.train.build import build_model, build_state, mesh_of
from nxtrain.train.graph_extraction import EVALUATED_BATCHES, few_micro_batches, trainer
from nxtrain.train.health.recompiles import GRAPHS

LINE_EVERY_S = 5.0  # seconds between lines of progress


def trace(
    plan: Resolved,
    world: int,
    ranks: Sequence[int],
    steps: int,
    hlo: Path | None,
    bind: Callable[[Backend], Binding] | None = None,
) -> dict[str, Any]:
    """Trace ranks of a world and return the report of their graphs.

    Args:
        plan: Resolved configuration.
        world: Number of ranks of the world.
        ranks: Ranks to trace.
        steps: Number of training steps.
        hlo: Folder for the graphs' HLO texts; None: they are not written.
        bind: Function that binds a vendor's library to a rank's backend; None: no library.
    """
    tape, seconds = _Recorder(num_ranks=len(ranks), num_steps=steps), list[float]()
    axes: dict[Groups, Axis] = {}
    stages: dict[int, int] = {}
    for rank in ranks:
        began = time.perf_counter()
        tape.begin_rank(rank, sum(seconds))
        mesh, table = _play(plan, world, tape, steps, bind)
        stages[rank] = mesh.pp.rank
        for axis in _axes(mesh, table):
            axes.setdefault(axis.groups, axis)
        seconds.append(round(time.perf_counter() - began, 2))
    if mesh.pp_size == 1:
        stages.clear()
    recording = Recording(
        world, ranks, steps, mesh.dp_cp.size, list(axes.values()), tape.cuts, tape.graphs, tape.reads, stages
    )
    findings = report(recording)
    if hlo is not None:
        hlo.mkdir(parents=True, exist_ok=True)
        for graph in findings["graphs"]:
            path = hlo / f"{re.sub('[^a-z0-9-]+', '-', graph['name'])}-{graph['hash'][:12]}.hlo.txt"
            path.write_text(tape.texts[graph["hash"]], encoding="utf-8")
            graph["hlo"] = str(path)
    train = plan.config.train
    of_run = train.global_batch // (train.micro_batch * mesh.dp.size)
    traced = few_micro_batches(plan.config, mesh).global_batch // (train.micro_batch * mesh.dp.size)
    return {**findings, "micro_batches": {"traced": traced, "of_run": of_run}, "seconds": seconds}


@dataclass
class _Recorder(RunObserver):
    """Recorder of submitted graphs and host reads, for the rank, step and phase that run at the moment.

    Progress goes to standard error: one line when a rank begins, then at most one every `LINE_EVERY_S` seconds.
    """

    num_ranks: int = 1
    num_steps: int = 1
    num_begun: int = 0
    next_line_s: float = 0.0
    rank: int = 0
    step: int = 0
    work: Work = "training"
    action: str = ""
    num_chunks: int = 1
    cuts: list[Cut] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    graphs: dict[str, HloGraph] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)

    def begin_rank(self, rank: int, spent_s: float) -> None:
        """Begin the recording of a rank.

        Args:
            spent_s: Seconds spent on all earlier ranks.
        """
        left = ""
        if spent_s:
            left = f", about {spent_s / self.num_begun * (self.num_ranks - self.num_begun):.0f} s left"
        self.rank, self.num_begun = rank, self.num_begun + 1
        self._print(f"builds the model{left}")

    def enter(self, step: int, work: Work) -> None:
        if work not in GRAPHS:
            return
        self.step, self.work = step, work
        if time.monotonic() >= self.next_line_s:
            self._print(f"step {step} of {self.num_steps}")

    def _print(self, text: str) -> None:
        self.next_line_s = time.monotonic() + LINE_EVERY_S
        standard_error().print(f"rank {self.rank} ({self.num_begun} of {self.num_ranks}): {text}")

    @contextmanager
    def act(self, action: Action) -> Iterator[None]:
        self.action = action.kind
        if action.is_transfer:
            self.action = "transfer"
        elif self.num_chunks > 1:
            self.action += f" chunk {action.chunk}"
        yield
        self.action = ""

    def graph(self, hash_: str, text: Callable[[], str]) -> None:
        self.cuts.append(Cut(self.rank, self.step, self.work, hash_, self.action))
        if hash_ not in self.graphs:  # the text of a big model takes longer than the rest of its step
            self.texts[hash_] = text()
            self.graphs[hash_] = parse(self.texts[hash_])

    def host_read(self, file: str, line: int, function: str) -> None:
        read = Read(self.rank, self.step, os.path.relpath(file), line, function)
        if read not in self.reads:
            self.reads.append(read)


def _play(
    plan: Resolved, world: int, tape: _Recorder, steps: int, bind: Callable[[Backend], Binding] | None = None
) -> tuple[Mesh, ParamTable]:
    """Run the trainer as one rank, on a backend that records graphs in place of running them."""
    config = plan.config
    backend = TracingBackend(world, tape.rank, tape)
    if bind is not None:
        backend.binding = bind(backend)
    with closing(backend.binding):
        mesh = mesh_of(plan, backend)
        with backend.building():
            state = build_state(plan, build_model(plan, backend, mesh, init="zeros"), backend, mesh)
        if state.pipeline is not None:
            tape.num_chunks, state.pipeline.watch = config.parallel.virtual_pp, tape.act
        eval_batches = min(config.train.eval_batches, EVALUATED_BATCHES)
        train = few_micro_batches(config, mesh).model_copy(update={"steps": steps, "eval_batches": eval_batches})
        short = config.model_copy(update={"train": train})
        with backend.recording():
            trainer(plan, state, short, Schedule.of(config), tape).run(0)
    return mesh, state.table


def _axes(mesh: Mesh, table: ParamTable) -> list[Axis]:
    """Mesh axes over which a rank communicates."""
    copies: set[int] = set()
    for spec in table.values():
        copies |= {piece.copies for piece in spec.pieces(mesh.tp)}
    shared = [mesh.tp.neighbours(number) for number in sorted(copies)]
    pp = mesh.pp
    pairs = []
    if pp.size > 1:
        pairs = [pp.pairs((pp.rank + 1) % pp.size), pp.pairs((pp.rank - 1) % pp.size)]
    data_parallel = [mesh.cp, mesh.dp, mesh.dp_cp, mesh.shard, mesh.replica]
    if mesh.ep_size > 1:
        data_parallel += [mesh.ep, mesh.experts.copies, mesh.experts.shard, mesh.experts.replica]
    axes = [mesh.tp, *data_parallel, pp, mesh.model, mesh.batch, mesh.state, *pairs, *shared]
    axes += [mesh.over(shard, "tp") for shard in ("shard", "expert_shard")]  # for Muon's whole matrices
    return [axis for axis in axes if axis.size > 1]


def main(job: Mapping[str, Any]) -> None:
    """Trace the job of `nxtrain graphs`, and print its report as JSON."""
    garbage.settle()
    plan = resolve_config(load(job["config"], job["overrides"]), job["world"])
    bind, lacking = None, ""
    if job["layers"] == "nxd":
        try:
            bind = simulated_nxd(INSTANCES[job["instance"]])
        except BackendError as error:
            lacking = str(error)
    hlo = Path(job["hlo"]) if job["hlo"] else None
    findings = trace(plan, job["world"], job["ranks"], job["steps"], hlo, bind)
    print(json.dumps({**findings, "lacking": lacking}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
