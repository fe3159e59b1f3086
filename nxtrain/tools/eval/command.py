"""`nxtrain eval`: find checkpoints, run tasks that have no result yet, and show the results."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nxtrain.backends import choose, open_backend
from nxtrain.backends.base import Backend
from nxtrain.checkpoint.mirror import checkpoints_in
from nxtrain.common.distributed.agreement import Ranks
from nxtrain.common.errors import ConfigError
from nxtrain.common.io import jsonl
from nxtrain.common.io.object_store import location_of
from nxtrain.common.mesh import Mesh
from nxtrain.common.process.console import standard_error
from nxtrain.common.process.placement import Placement
from nxtrain.common.process.progress import Progress
from nxtrain.common.run_folder import CONFIG_FILE, EVALUATION_CACHE_DIR, EVALUATIONS_FILE
from nxtrain.tools.eval.harness import HarnessTask, definition_of
from nxtrain.tools.eval.leader_scorer import run_on_leader
from nxtrain.tools.eval.offline import offline_task, texts_of
from nxtrain.tools.eval.pairs import PairsTask
from nxtrain.tools.eval.scorer import Scorer
from nxtrain.tools.eval.suites import Choice, choose_tasks
from nxtrain.tools.eval.task import Metrics, Task, is_number
from nxtrain.tools.eval.trained import Trained

DEFAULT_LIMIT = 200  # default number of requests of a local task
MAX_LIMIT = 1_000_000  # largest number of requests of a local task; all of them are in memory

WAIT_S = 86_400.0
"""Timeout in seconds with which ranks wait for the leader.

The leader downloads the data of tasks, and may run generated programs for hours.
"""


@dataclass(frozen=True)
class Options:
    """Options of `nxtrain eval`."""

    tasks: tuple[str, ...] = ()  # names of tasks and suites; empty: the offline suite
    every: bool = False  # True for every checkpoint of a run, not only the newest
    seed: int = 0
    limit: int = 0  # maximum requests per task; 0: 200 for each local task, all for other tasks
    folder: Path | None = None  # folder of the user's own tasks of the harness
    tp: int = 1  # tensor parallel ranks of each model
    pairs: Path | None = None  # prepared corpus of preference pairs; if `tasks` is empty, no other task runs
    reference: str = ""  # address of the reference model for preference pairs; empty: no reference
    beta: float = 0.1  # factor of rewards relative to a reference, as in DPO


@dataclass(frozen=True)
class Evaluation:
    """Evaluation results of one checkpoint."""

    model: Trained
    tasks: dict[str, Metrics]
    texts: str  # origin of the texts of the local tasks

    def to_json(self) -> dict[str, Any]:
        """Convert the results to JSON types, for `--json`."""
        return {
            "checkpoint": str(self.model.location),
            "step": self.model.step,
            "tokens": self.model.tokens,
            "texts": self.texts,
            "tasks": {name: dict(metrics) for name, metrics in self.tasks.items()},
        }


def evaluate(address: str, options: Options, note: Callable[[str], None] = lambda line: None) -> list[Evaluation]:
    """Evaluate one or more checkpoints; every rank calls this function and scores a part of the requests.

    Args:
        address: A run folder, a checkpoint, a mirror or its address, or a Hugging Face folder.
        note: Called with lines about the progress, on every rank.
    """
    with Progress("reading the names of tasks", console=standard_error(quiet=not Placement.read().is_leader)):
        choices: Sequence[Choice] = ()
        registry: Any = None
        if options.tasks or options.pairs is None:
            choices, registry = choose_tasks(options.tasks, options.folder)
    if any(choice.is_local for choice in choices) and options.limit > MAX_LIMIT:
        raise ConfigError(f"--limit {options.limit:,} is too high: local tasks draw {MAX_LIMIT:,} requests at most")
    pairs: PairsTask | None = None
    if options.pairs is not None:
        reference = Trained.find(options.reference) if options.reference else None
        pairs = PairsTask(options.pairs, reference, options.beta, options.limit)
    backend = open_backend(choose("auto")[0])
    try:
        if backend.world % options.tp:
            raise ConfigError(
                f"--tp {options.tp} does not divide the {backend.world} ranks; start a multiple of {options.tp} by "
                f"torchrun --nproc-per-node N -m nxtrain eval, or give another --tp"
            )
        ranks = Ranks(Mesh.build(backend.world, backend.rank, tp=options.tp), backend.host_group)
        backend.lay_out(ranks.mesh)
        waiting = Ranks(ranks.mesh, backend.background_group(WAIT_S) or ranks.group)
        evaluations = []
        # A run that is still training saves and deletes checkpoints, so that each rank would find others.
        for one in ranks.on_leader(lambda: _chosen(address, options), f"cannot look for checkpoints in {address}"):
            model = Trained.find(one)
            run: Path | None = None
            if not model.is_hf and isinstance(model.location, Path):
                folder = model.location.resolve().parent.parent
                if (folder / CONFIG_FILE).is_file():
                    run = folder
            texts, tasks = _tasks(model, run, choices, registry, options, ranks, note)
            if pairs is not None:
                pairs.check(model)
                tasks.append(pairs)
            results = _evaluate(model, run, tasks, backend, ranks, waiting, note)
            evaluations.append(Evaluation(model, results, texts))
        return evaluations
    finally:
        backend.close()


def _tasks(
    model: Trained,
    run: Path | None,
    choices: Sequence[Choice],
    registry: Any,
    options: Options,
    ranks: Ranks,
    note: Callable[[str], None],
) -> tuple[str, list[Task | HarnessTask | PairsTask]]:
    """Origin of the texts of local tasks, and all chosen tasks with their requests."""
    origin, texts = "", list[str]()
    if any(choice.is_local for choice in choices):
        read = partial(texts_of, run, model.tokenizer, model.ends)
        origin, texts = ranks.on_leader(read, "cannot read the texts of the tasks")
    tasks: list[Task | HarnessTask | PairsTask] = []
    for choice in choices:
        if not choice.is_local:
            numbers = (choice.num_shots, options.limit, options.seed)
            tasks.append(HarnessTask(choice.name, *numbers, registry, definition_of(choice.name, options.folder)))
            continue
        task = offline_task(choice.name, texts, options.seed, options.limit or DEFAULT_LIMIT)
        if task.requests:
            tasks.append(task)
        else:
            note(f"{choice.name} is left out: the {origin} is too short for a request")
    return origin, tasks


def _evaluate(
    model: Trained,
    run: Path | None,
    tasks: Sequence[Task | HarnessTask | PairsTask],
    backend: Backend,
    ranks: Ranks,
    waiting: Ranks,
    note: Callable[[str], None],
) -> dict[str, Metrics]:
    """Metrics of all tasks for one checkpoint; tasks with a result in the run folder do not run again."""
    record = ranks.on_leader(lambda: Record(run), f"cannot read the evaluations of {run}")
    results: dict[str, Metrics] = {}
    scorer: Scorer | None = None
    for task in tasks:
        metrics = record.find(model, task.name, task.identity)
        if metrics is None:
            note(f"{model.location}: {task.name}")
            with Progress(task.name, console=standard_error(quiet=not ranks.is_leader)) as progress:
                if scorer is None:
                    progress.show(0, f"reading the weights of {model.location}")
                    scorer = Scorer(model, backend, ranks)
                    progress.show(0, task.name)
                scorer.progress = progress
                metrics = _run(task, scorer, waiting, run, backend)
            add = partial(record.add, model, task.name, task.identity, metrics)
            ranks.on_leader(add, f"cannot record the result in {run}")
        results[task.name] = metrics
    return results


def _run(
    task: Task | HarnessTask | PairsTask, scorer: Scorer, waiting: Ranks, run: Path | None, backend: Backend
) -> Metrics:
    if isinstance(task, PairsTask):
        return task.run(scorer, backend)
    if isinstance(task, HarnessTask):
        answers = run / EVALUATION_CACHE_DIR if run else None
        return run_on_leader(scorer, waiting, lambda led: task.run(led, answers))
    pairs = []
    for request in task.requests:
        pairs += [(request.context, choice) for choice in request.choices]
    scores = iter(scorer.likelihoods(pairs))
    likelihoods = []
    for request in task.requests:
        likelihoods.append([next(scores).nats for _ in request.choices])
    return task.measure(likelihoods)


def _chosen(address: str, options: Options) -> list[str]:
    """Addresses of the models to evaluate; with `--all` the complete checkpoints of a run or a mirror, oldest first."""
    if not options.every:
        return [str(Trained.find(address, reads_text=False).location)]
    kept = [str(checkpoint) for checkpoint in checkpoints_in(location_of(address))]
    if not kept:
        raise ConfigError(f"{address} has no checkpoints; --all takes a run folder or a mirror")
    return kept


def table(evaluations: Sequence[Evaluation]) -> str:
    """Format evaluation results as a table for the terminal, with one line per task and checkpoint."""
    lines = []
    for evaluation in evaluations:
        head = str(evaluation.model.location)
        if evaluation.model.step:
            head += f", step {evaluation.model.step:,}"
        if evaluation.texts:
            head += f"; texts: {evaluation.texts}"
        lines.append(head)
        for name, metrics in evaluation.tasks.items():
            metric = next(iter(metrics))
            stderr = ""
            if metrics["stderr"] is not None:
                stderr = f"+- {metrics['stderr']:.4f}"
            line = f"  {name:<24} {metric:<14} {metrics[metric]:>9.4f} {stderr:<9}  n={metrics['n']:<6}"
            if "chance" in metrics:
                line += f" chance {metrics['chance']:.3f}"
            lines.append(line.rstrip())
    return "\n".join(lines)


class Record:
    """Evaluation results stored in a run folder; without a run folder, results stay in memory."""

    def __init__(self, folder: Path | None) -> None:
        self._file = folder / EVALUATIONS_FILE if folder else None
        self._done: dict[tuple[object, ...], Metrics] = {}
        if self._file:
            for line in jsonl.read(self._file):
                if _is_whole(line):
                    self._done[line["weights"], line["task"], line["question"]] = line["metrics"]

    def find(self, model: Trained, task: str, question: str) -> Metrics | None:
        """Look up a task's stored result; None if there is none.

        Args:
            question: Identity of the task's requests, which depends on seed and limit.
        """
        return self._done.get((model.identity, task, question))

    def add(self, model: Trained, task: str, question: str, metrics: Metrics) -> None:
        """Append a task's result to the record."""
        line = {"step": model.step, "tokens": model.tokens, "weights": model.identity}
        line |= {"task": task, "question": question, "metrics": dict(metrics)}
        if self._file:
            jsonl.append(self._file, json.dumps(line, allow_nan=False))
        self._done[model.identity, task, question] = metrics


def _is_whole(line: Mapping[str, Any]) -> bool:
    """Return True if a line of the file is a valid record, with metrics as described by `Metrics`."""
    metrics = line.get("metrics")
    if not isinstance(metrics, dict) or not metrics.keys() >= {"stderr", "n"} or next(iter(metrics)) in ("stderr", "n"):
        return False
    for name, value in metrics.items():
        if not is_number(value) and (name != "stderr" or value is not None):
            return False
    return all(isinstance(line.get(name), str) for name in ("weights", "task", "question"))
