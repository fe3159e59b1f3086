"""`nxtrain eval`: find checkpoints, run the tasks that are not done yet, and show the results."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nxtrain.backends import choose, open_backend
from nxtrain.backends.base import Backend
from nxtrain.checkpoint import directory
from nxtrain.checkpoint.mirror import Mirror
from nxtrain.common.distributed.agreement import Ranks
from nxtrain.common.errors import ConfigError
from nxtrain.common.io.object_store import open_store, place_of
from nxtrain.common.mesh import Mesh
from nxtrain.common.process import progress
from nxtrain.common.process.console import standard_error
from nxtrain.common.process.placement import Placement
from nxtrain.common.run_folder import CHECKPOINTS_DIR, CONFIG_FILE, EVALUATION_CACHE_DIR
from nxtrain.tools.eval.harness import HarnessTask, definition_of
from nxtrain.tools.eval.led_scorer import lead
from nxtrain.tools.eval.offline import offline_task
from nxtrain.tools.eval.record import Record
from nxtrain.tools.eval.scorer import Scorer
from nxtrain.tools.eval.suites import Choice, choose_tasks
from nxtrain.tools.eval.task import Metrics, Task
from nxtrain.tools.eval.texts import texts_of
from nxtrain.tools.eval.trained import Trained

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager


@dataclass(frozen=True)
class Options:
    """Options of an evaluation.

    Args:
        tasks: Names of tasks and suites; empty: the offline suite.
        every: Evaluate every checkpoint that is kept, not only the newest.
        seed: Seed of the requests.
        limit: Most requests of a task; 0: 200 of each local task, all of the others.
        folder: Folder of the user's own tasks of the harness.
        tp: Ranks that share each model.
    """

    tasks: tuple[str, ...] = ()
    every: bool = False
    seed: int = 0
    limit: int = 0
    folder: Path | None = None
    tp: int = 1


@dataclass(frozen=True)
class Evaluation:
    """Results of one checkpoint.

    Args:
        model: The checkpoint.
        tasks: Metrics by name of the task.
        texts: Origin of the texts of the local tasks.
    """

    model: Trained
    tasks: dict[str, Metrics]
    texts: str

    def to_json(self) -> dict[str, Any]:
        """Content of `--json`."""
        tasks = {name: dict(metrics) for name, metrics in self.tasks.items()}
        found = {"checkpoint": str(self.model.place), "step": self.model.step, "tokens": self.model.tokens}
        return {**found, "texts": self.texts, "tasks": tasks}


def evaluate(address: str, options: Options, note: Callable[[str], None] = lambda line: None) -> list[Evaluation]:
    """Evaluate checkpoints; every rank calls this, and ranks share the requests.

    Args:
        address: A run folder, a checkpoint, a mirror or its address in S3, or a Hugging Face folder.
        options: Tasks, checkpoints and seed.
        note: Prints a line for the user.

    Raises:
        ConfigError: A task is unknown, the limit is too high, the model carries no tokenizer, or tp does not divide
            it or the world.
        CheckpointError: A checkpoint is absent or damaged.
        DivergedError: The model's scores are not finite.
    """
    leads = Placement.read().is_leader
    with progress.Progress("reading the names of tasks", console=standard_error(quiet=not leads)):
        chosen, registry = choose_tasks(options.tasks, options.folder)
    if any(choice.is_local for choice in chosen) and options.limit > MAX_LIMIT:
        raise ConfigError(f"--limit {options.limit:,} is too high: local tasks draw {MAX_LIMIT:,} requests at most")
    places = _kept(address) if options.every else [address]
    backend = open_backend(choose("auto")[0])
    try:
        if backend.world % options.tp:
            raise ConfigError(
                f"--tp {options.tp} does not divide the {backend.world} ranks; start a multiple of {options.tp} by "
                f"torchrun --nproc-per-node N -m nxtrain eval, or give another --tp"
            )
        ranks = Ranks(Mesh.build(backend.world, backend.rank, tp=options.tp), backend.host_group)
        backend.lay_out(ranks.mesh)
        say = note if ranks.is_leader else lambda line: None
        waiting = Ranks(ranks.mesh, backend.background_group(WAIT_S) or ranks.group)
        evaluator = _Evaluator(backend, ranks, waiting, chosen, registry, options, say)
        return [evaluator.evaluate(Trained.find(place)) for place in places]
    finally:
        backend.close()


WAIT_S = 86_400.0
"""Seconds that ranks wait for the leader, which fetches the data of tasks, and may run programs for hours."""

PROGRESS_S = 10.0
"""Seconds between two lines of progress of a task."""


class EvalProgress:
    """Lines of progress of a task that takes long.

    Args:
        note: Prints a line for the user.
        task: Name of the task.
        clock: Seconds, monotonic.
    """

    def __init__(self, note: Callable[[str], None], task: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._note, self._task, self._clock, self._since_s = note, task, clock, clock()

    def __call__(self, done: int, number: int) -> None:
        """Print a line if the last one is long ago.

        Args:
            done: Rows that this rank has scored or continued.
            number: All of its rows in this pass.
        """
        if self._clock() - self._since_s >= PROGRESS_S and done < number:
            self._since_s = self._clock()
            self._note(f"{self._task}: {done:,} of {number:,} rows of this rank")


@dataclass(frozen=True)
class _Evaluator:
    """Evaluates one checkpoint after the other on open devices."""

    backend: Backend
    ranks: Ranks
    waiting: Ranks
    chosen: Sequence[Choice]
    registry: TaskManager | None
    options: Options
    note: Callable[[str], None]

    def evaluate(self, model: Trained) -> Evaluation:
        """Run the tasks of a checkpoint that its run folder has no result of."""
        run = _run_of(model)
        record = self.ranks.on_leader(lambda: Record(run), f"cannot read the evaluations of {run}")
        origin, tasks = self._tasks(model, run)
        found: dict[str, Metrics] = {}
        scorer: Scorer | None = None
        for task in tasks:
            done = record.find(model, task.name, task.identity)
            if done is None:
                self.note(f"{model.place}: {task.name}")
                scorer = scorer or self._open(model)
                scorer.tell = EvalProgress(self.note, task.name)
                done = self._run(task, scorer, run)
                self.ranks.on_leader(
                    partial(record.add, model, task.name, task.identity, done), f"cannot record the result in {run}"
                )
            found[task.name] = done
        return Evaluation(model, found, origin)

    def _open(self, model: Trained) -> Scorer:
        console = standard_error(quiet=not self.ranks.is_leader)
        with progress.Progress(f"reading the weights of {model.place}", console=console):
            return Scorer(model, self.backend, self.ranks)

    def _tasks(self, model: Trained, run: Path | None) -> tuple[str, list[Task | HarnessTask]]:
        """Tasks with their requests, and the origin of the texts of local ones."""
        local = [choice for choice in self.chosen if choice.is_local]
        origin, texts = texts_of(run, model.tokenizer, model.ends) if local else ("", [])
        tasks: list[Task | HarnessTask] = []
        for choice in self.chosen:
            if not choice.is_local:
                assert self.registry is not None
                numbers = (choice.num_shots, self.options.limit, self.options.seed)
                definition = definition_of(choice.name, self.options.folder)
                tasks.append(HarnessTask(choice.name, *numbers, self.registry, definition))
                continue
            task = offline_task(choice.name, texts, self.options.seed, self.options.limit or DEFAULT_LIMIT)
            if task.requests:
                tasks.append(task)
            else:
                self.note(f"{choice.name} is left out: the {origin} is too short for a request")
        return origin, tasks

    def _run(self, task: Task | HarnessTask, scorer: Scorer, run: Path | None) -> Metrics:
        if isinstance(task, HarnessTask):
            answers = run / EVALUATION_CACHE_DIR if run else None
            return lead(scorer, self.waiting, lambda led: task.run(led, answers))
        pairs = [(request.context, choice) for request in task.requests for choice in request.choices]
        flat = iter(scorer.likelihoods(pairs))
        return task.measure([[next(flat).nats for _ in request.choices] for request in task.requests])


DEFAULT_LIMIT = 200
"""Requests of a local task."""

MAX_LIMIT = 1_000_000
"""Most requests of a local task, all of which are in memory; most tasks could go on without end."""


def _kept(address: str) -> list[str]:
    """Every complete checkpoint of a run folder, a `checkpoints` folder or a mirror, oldest first."""
    place = place_of(address)
    if isinstance(place, Path):
        found = directory.list_checkpoints(place) or directory.list_checkpoints(place / CHECKPOINTS_DIR)
        listed = [str(path) for path in found]
    else:
        mirrors = [Mirror(open_store(folder)) for folder in (place, place / CHECKPOINTS_DIR)]
        listed = [str(mirror.place(step)) for mirror in mirrors for step in mirror.steps()]
    if not listed:
        raise ConfigError(f"{address} keeps no checkpoints; --all takes a run folder or a mirror")
    return listed


def _run_of(model: Trained) -> Path | None:
    """Run folder of a checkpoint; None if the checkpoint is in none."""
    if model.is_hf or not isinstance(model.place, Path):
        return None
    folder = model.place.resolve().parent.parent
    return folder if (folder / CONFIG_FILE).is_file() else None


def table(found: Sequence[Evaluation]) -> str:
    """Results for people: a line for each task of each checkpoint."""
    lines = []
    for each in found:
        step = f", step {each.model.step:,}" if each.model.step else ""
        texts = f"; texts: {each.texts}" if each.texts else ""
        lines.append(f"{each.model.place}{step}{texts}")
        for name, metrics in each.tasks.items():
            metric = next(iter(metrics))
            stderr = "" if metrics["stderr"] is None else f"+- {metrics['stderr']:.4f}"
            chance = f"chance {metrics['chance']:.3f}" if "chance" in metrics else ""
            line = f"  {name:<24} {metric:<14} {metrics[metric]:>9.4f} {stderr:<9}  n={metrics['n']:<6} {chance}"
            lines.append(line.rstrip())
    return "\n".join(lines)
