"""Tasks of the lm-evaluation-harness, for machines that can download the tasks' data.

Only the leader runs the harness. All ranks share its requests: see `nxtrain.tools.eval.leader_scorer`.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nxtrain.checkpoint.meta import fingerprint
from nxtrain.common.errors import DataError, NxtrainError
from nxtrain.tools.eval.generate import Sampling
from nxtrain.tools.eval.leader_scorer import LeaderScorer, is_of_the_scorer
from nxtrain.tools.eval.scorer import Likelihood, Scorer
from nxtrain.tools.eval.task import Metrics, is_number

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

PACKAGE = "lm_eval"

CODE_VARIABLE = "HF_ALLOW_CODE_EVAL"
"""Environment variable by which the user allows programs written by the model to run on this machine."""

ADDED_TOKENS = 256  # maximum number of generated tokens if a task sets none


@dataclass(frozen=True)
class HarnessTask:
    """One task or group of tasks of the lm-evaluation-harness."""

    name: str
    num_shots: int | None  # few-shot examples before each question; None: the task's own number
    limit: int  # maximum requests of each task; 0: all
    seed: int
    registry: TaskManager
    definition: str = ""  # digest of the files that define the task, as `definition_of` gives it

    @property
    def identity(self) -> str:
        """Text that identifies the task's requests; results with equal identities answer the same questions."""
        shots = "own" if self.num_shots is None else self.num_shots
        identity = f"{PACKAGE}-{version(PACKAGE)} shots={shots} limit={self.limit} seed={self.seed}"
        if self.definition:
            identity += f" definition={self.definition}"
        return identity

    def run(self, scorer: Scorer | LeaderScorer, answers: Path | None) -> Metrics:
        """Run the task in the harness; only the leader calls this method.

        Args:
            answers: Folder in which answers are kept, so that a killed evaluation continues; None: answers are not
                kept.

        Raises:
            DataError: The task's data is unavailable, its files are damaged, or it has no metrics.
        """
        from lm_eval.evaluator import simple_evaluate

        cache = None
        if answers:
            answers.mkdir(parents=True, exist_ok=True)  # outside the try block, since its failure is not the task's
            # Answers of other weights, or of other examples, are in other files.
            names = (scorer.model.identity, self.name, self.identity)
            cache = str(answers / fingerprint([name.encode() for name in names]))
        try:
            evaluated = simple_evaluate(
                adapter(scorer, self.seed),
                tasks=[self.name],
                num_fewshot=self.num_shots,
                limit=self.limit or None,
                use_cache=cache,
                log_samples=False,
                task_manager=self.registry,
                random_seed=self.seed,
                numpy_random_seed=self.seed % (1 << 32),  # numpy accepts only 32-bit seeds
                torch_random_seed=self.seed,
                fewshot_random_seed=self.seed,
                confirm_run_unsafe_code=os.environ.get(CODE_VARIABLE) == "1",
            )
        except Exception as error:  # task files contain expressions and code, which may raise any exception
            if isinstance(error, NxtrainError | MemoryError) or is_of_the_scorer(error):
                raise
            reason = (str(error).strip() or repr(error)).splitlines()[0]
            hint = "check the task's files, its data and the number of solved examples"
            kind = type(error).__name__
            raise DataError(f"--tasks {self.name}: the harness cannot run this: {kind}: {reason}; {hint}") from error
        return _metrics(self.name, evaluated)


def is_installed() -> bool:
    """Return True if the lm-evaluation-harness is installed."""
    try:
        version(PACKAGE)
    except PackageNotFoundError:
        return False
    return True


OWN_TASKS = Path(__file__).parent / "tasks"  # folder of nxtrain's tasks in the harness's YAML


def open_registry(wanted: Sequence[str], folder: Path | None) -> TaskManager:
    """Open the registry of tasks: nxtrain's, the user's, and the harness's if other tasks are wanted.

    Args:
        wanted: Names of the chosen tasks.
        folder: Folder of the user's own tasks; None: no such folder.
    """
    # The harness has thousands of files, which take seconds to read.
    own = _registry(folder, own_only=True)
    if set(wanted) <= set(own.all_tasks):
        return own
    return _registry(folder, own_only=False)


_NAMING = re.compile(r"^\s*(?:- |(?:- )?[\"']?(?:task|group|tag)[\"']?\s*:)(.{0,300})$", re.MULTILINE)
"""Pattern of lines in a task's YAML file that may contain the name of a task, group or tag."""

_NAME = re.compile(r"[^\s,\[\]{}\"']+")


def possible_names(folder: Path | None) -> frozenset[str]:
    """Superset of the names of all tasks, groups and tags: words of the tasks' files, and words between two commas.

    The registry parses these files, which takes ten times as long. A name that is not in this set is in no registry.
    """
    roots = [OWN_TASKS]
    package = find_spec(PACKAGE)
    if package and package.origin:
        roots.append(Path(package.origin).parent / "tasks")
    if folder:
        roots.append(folder)
    names: set[str] = set()
    for root in roots:
        for file in root.rglob("*"):
            if file.suffix in {"", ".yaml", ".yml"} and file.is_file():  # templates have no suffix
                for line in _NAMING.findall(file.read_text(encoding="utf-8", errors="replace")):
                    names.update(_NAME.findall(line))
                    parts = line.partition(" #")[0].split(",")
                    names.update(part.strip(" \t[]{}\"'") for part in parts)  # names may have spaces
    return frozenset(names)


def definition_of(name: str, folder: Path | None) -> str:
    """Digest of the files that define a task of nxtrain or of the user; empty for the harness's own tasks.

    YAML and Python files count by content. Data files count by size and modification time.
    """
    if name not in _registry(folder, own_only=True).all_tasks:
        return ""
    roots = [OWN_TASKS]
    if folder:
        roots.append(folder)
    parts = []
    for root in roots:
        for file in sorted(root.rglob("*")):
            if not file.is_file() or "__pycache__" in file.parts:
                continue
            parts.append(str(file.relative_to(root)).encode())
            if file.suffix in (".yaml", ".py"):
                parts.append(file.read_bytes())
            else:
                stat = file.stat()
                parts.append(f"{stat.st_size} {stat.st_mtime_ns}".encode())
    return fingerprint(parts)


@cache
def _registry(folder: Path | None, *, own_only: bool) -> TaskManager:
    logging.getLogger(PACKAGE).setLevel(logging.ERROR)
    from lm_eval.tasks import TaskManager

    folders = [str(folder_of_tasks) for folder_of_tasks in (OWN_TASKS, folder) if folder_of_tasks]
    return TaskManager(include_path=folders, include_defaults=not own_only)


def adapter(scorer: Scorer | LeaderScorer, seed: int = 0) -> Any:
    """Model class of the harness that gets its results from a scorer."""
    from lm_eval.api.model import LM

    class ScoredLM(LM):  # type: ignore[misc, unused-ignore]
        """Adapter of a scorer to the model interface of the harness."""

        def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
            pairs = [request.args for request in requests]

            def keep(number: int, score: Likelihood) -> None:
                self.cache_hook.add_partial("loglikelihood", pairs[number], (score.nats, score.is_greedy))

            return [(score.nats, score.is_greedy) for score in scorer.likelihoods(pairs, done=keep)]

        def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
            asked = [request.args for request in requests]

            def keep(number: int, score: Likelihood) -> None:
                self.cache_hook.add_partial("loglikelihood_rolling", asked[number], score.nats)

            texts = [text for (text,) in asked]
            return [score.nats for score in scorer.rolling(texts, done=keep)]

        def generate_until(self, requests: Sequence[Any]) -> list[str]:
            return _continued(scorer, [request.args for request in requests], self.cache_hook.add_partial, seed)

    return ScoredLM()


def _continued(
    scorer: Scorer | LeaderScorer, asked: Sequence[tuple[str, dict[str, Any]]], keep: Callable[..., None], seed: int
) -> list[str]:
    """Generate continuations for the harness, in one batch for each set of sampling parameters.

    Only greedy continuations are kept in the harness's cache.
    """
    from lm_eval.models.utils import normalize_gen_kwargs

    groups: dict[Sampling, list[int]] = {}
    requests = []
    for number, (text, options) in enumerate(asked):
        rule = normalize_gen_kwargs(options, ADDED_TOKENS)
        temperature = 0.0
        if rule.get("do_sample"):
            temperature = float(rule.get("temperature", 1.0))
        sampling = Sampling(temperature, int(rule.get("top_k") or 0), float(rule.get("top_p") or 1.0))
        groups.setdefault(sampling, []).append(number)
        requests.append((text, int(rule["max_gen_toks"]), tuple(stop for stop in rule["until"] if stop)))
    texts = [""] * len(asked)
    for sampling, numbers in groups.items():

        def done(number: int, text: str, sampling: Sampling = sampling, numbers: Sequence[int] = numbers) -> None:
            if sampling.temperature == 0:
                keep("generate_until", asked[numbers[number]], text)

        continued = scorer.continuations([requests[n] for n in numbers], sampling, done=done, seed=seed)
        for number, text in zip(numbers, continued, strict=True):
            texts[number] = text
    return texts


def _metrics(name: str, evaluated: Any) -> Metrics:
    """Metrics of a task from the harness's results.

    `stderr` belongs to the first metric. The errors of other metrics have names of their own. A tag, or a group without
    a result of its own, has the metrics of its tasks as `TASK_METRIC`.
    """
    results: dict[str, dict[str, Any]] = evaluated["results"]
    metrics, stderr = _finite(results.get(name, {}))
    if not metrics:
        for task in evaluated["n-samples"]:
            of_task, error = _finite(results.get(task, {}))
            if not metrics:
                stderr = error
            metrics |= {f"{task}_{metric}": value for metric, value in of_task.items()}
    if not metrics:
        raise DataError(f"--tasks {name}: none of its metrics is a finite number; check the task's files and its data")
    return {**metrics, "stderr": stderr, "n": sum(counts["effective"] for counts in evaluated["n-samples"].values())}


def _finite(results: Mapping[str, Any]) -> tuple[dict[str, float | int], float | None]:
    """Metrics of the harness that are finite numbers, and the standard error of the first metric if known."""
    metrics: dict[str, float | int] = {}
    stderr = None
    for key, value in results.items():
        metric, _, filtered = key.partition(",")
        if not filtered or not is_number(value):
            continue
        if not metrics:
            stderr = results.get(f"{metric}_stderr,{filtered}")
        if filtered != "none":
            metric = f"{metric}_{filtered}"
        metrics[metric] = value
    if not is_number(stderr):
        stderr = None
    return metrics, stderr
