"""Harness tasks of several ranks: by torchrun, after a kill, and against the harness's own backend for transformers."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from nxtrain.backends.base import Backend
from nxtrain.checkpoint.convert.hf import hf_to_nxtrain
from nxtrain.common import hf_files
from nxtrain.common.distributed.agreement import Ranks
from nxtrain.common.errors import DataError
from nxtrain.common.mesh import Mesh
from nxtrain.tools.eval import harness
from nxtrain.tools.eval import scorer as scorers
from nxtrain.tools.eval.leader_scorer import run_on_leader
from nxtrain.tools.eval.scorer import Scorer
from nxtrain.tools.eval.task import Metrics
from nxtrain.tools.eval.trained import Trained
from tests.support.commands import output_of
from tests.support.drawn import one_in
from tests.support.models import LENGTH, TEXT
from tests.support.ranks import RankPool
from tests.train.conftest import write_tasks

pytest.importorskip("lm_eval", reason='no lm_eval: pip install ".[eval]", which .[dev] holds')
pytestmark = pytest.mark.filterwarnings("ignore")  # of the harness and of what it imports

WORDS = TEXT.split()

TASKS = {
    "choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: gold
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "last": """
output_type: loglikelihood
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
metric_list: [{metric: perplexity}, {metric: acc}]
""",
    "rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: bits_per_byte}, {metric: word_perplexity}]
""",
    "writing": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "fox"
generation_kwargs: {until: ["fox"], max_gen_toks: 9}
metric_list: [{metric: exact_match}]
""",
}
NAMES = tuple(f"own_{name}" for name in TASKS)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Drawn questions as tasks, and a cache of data sets that goes with the tests."""
    folder, drawn = tmp_path_factory.mktemp("tasks"), random.Random(19)
    questions: list[dict[str, Any]] = []
    for _ in range(37):
        question = " ".join(drawn.choices(WORDS, k=drawn.choice([1, 4, 9, 30])))
        choices = drawn.sample(WORDS, 3)
        questions.append({"question": question, "choices": choices, "gold": drawn.randrange(3)})
    write_tasks(folder, TASKS, questions)
    with pytest.MonkeyPatch.context() as patch:
        import datasets.config

        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield folder


@pytest.fixture(scope="module")
def alone(hf: Path, tasks: Path) -> dict[str, Metrics]:
    out = output_of("eval", hf, "--tasks", ",".join(NAMES), "--task-dir", tasks, "--json")
    result: dict[str, Metrics] = json.loads(out)["tasks"]
    return result


@pytest.mark.parametrize("tp", one_in(2, [1, 2]))
def test_ranks_of_torchrun_give_the_results_of_one_process(
    hf: Path, tasks: Path, alone: dict[str, Metrics], tmp_path: Path, tp: int
) -> None:
    """By a run folder, whose record and answers the ranks share."""
    hf_to_nxtrain(hf, tmp_path / "run" / "checkpoints" / "step-00000000")
    (tmp_path / "run" / "config.toml").touch()
    options = ("--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2")
    words = ("eval", tmp_path / "run", "--tasks", ",".join(NAMES), "--task-dir", tasks, "--json", "--tp", tp)
    argv = (sys.executable, "-m", "torch.distributed.run", *options, "-m", "nxtrain", *map(str, words))
    environ = {**os.environ, "HF_DATASETS_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False, env=environ)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)["tasks"]
    assert result.keys() == alone.keys()
    for name, metrics in alone.items():
        if tp == 1:  # the same rows side by side
            assert result[name] == metrics
        numbers = {metric: value for metric, value in metrics.items() if value is not None}
        assert {metric: result[name][metric] for metric in numbers} == pytest.approx(numbers, rel=1e-3), name
    exact = ("acc", "acc_stderr", "acc_norm", "acc_norm_stderr", "stderr", "n")
    for metric in exact:
        assert result["own_choice"][metric] == alone["own_choice"][metric]
    assert len((tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()) == len(NAMES)


def evaluated(backend: Backend, model_folder: Path, tasks: Path, answers: Path, tp: int, rounds: int) -> Metrics | str:
    """Results of a task on one rank, as torchrun starts it, or the error of its death after some rounds."""
    backend.lay_out(mesh := Mesh.build(backend.world, backend.rank, tp=tp))
    ranks = Ranks(mesh, backend.host_group)
    scorer, left = Scorer(Trained.find(str(model_folder)), backend, ranks), rounds
    compute = scorer._score

    def dying(rows: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise RuntimeError("killed")
        return compute(rows)

    scorer._score = dying  # type: ignore[method-assign]
    task = harness.HarnessTask("own_choice", None, 0, 0, harness.open_registry(["own_choice"], tasks))
    place_of_rank = {"LOCAL_RANK": str(backend.rank), "RANK": str(backend.rank)}
    with mock.patch.dict(os.environ, place_of_rank), mock.patch.object(scorers, "MAX_ROWS", 4):
        try:
            return run_on_leader(scorer, ranks, lambda led: task.run(led, answers))
        except RuntimeError as error:
            return f"{error} after {rounds - left - 1}"


@pytest.mark.parametrize("tp", [1, 2])
def test_ranks_go_on_after_a_kill_with_the_answers_that_all_of_them_gave(
    hf: Path, tasks: Path, alone: dict[str, Metrics], ranks: RankPool, tmp_path: Path, tp: int
) -> None:
    rounds = 111 // 4 // (2 // tp) + 1  # of 37 questions with three choices
    killed = ranks.run(2, evaluated, hf, tasks, tmp_path, tp, rounds - 2)
    assert killed == [f"killed after {rounds - 2}"] * 2
    again = ranks.run(2, evaluated, hf, tasks, tmp_path, tp, 3)  # all but the last rounds are known
    for result in again:
        assert result == pytest.approx(alone["own_choice"], rel=1e-4)


def failing(backend: Backend, model_folder: Path, error: Exception) -> tuple[str, str]:
    """Error of a program that fails on the leader, as each rank gets it."""
    backend.lay_out(mesh := Mesh.build(backend.world, backend.rank))
    ranks = Ranks(mesh, backend.host_group)

    def program(led: Any) -> None:
        led.rolling(["fox"], done=lambda number, result: None)
        raise error

    try:
        run_on_leader(Scorer(Trained.find(str(model_folder)), backend, ranks), ranks, program)
    except Exception as found:
        return type(found).__name__, str(found)
    return "", ""


def test_a_task_at_fault_ends_every_rank_with_its_message(hf: Path, ranks: RankPool) -> None:
    assert ranks.run(2, failing, hf, DataError("no such data")) == [("DataError", "no such data")] * 2
    (kind, words), (other_kind, other_words) = ranks.run(2, failing, hf, ValueError("x"))
    assert (kind, words, other_kind) == ("ValueError", "x", "CheckpointError") and "ValueError('x')" in other_words


def test_the_harness_finds_the_same_for_transformers_itself(hf: Path, tasks: Path, alone: dict[str, Metrics]) -> None:
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(hf / hf_files.TOKENIZER), eos_token="<|endoftext|>")
    model = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32)
    theirs = HFLM(pretrained=model, tokenizer=tokenizer, device="cpu", batch_size=4, max_length=LENGTH)
    actual = simple_evaluate(
        theirs,
        tasks=list(NAMES),
        task_manager=harness.open_registry(NAMES, tasks),
        random_seed=0,
        numpy_random_seed=0,
        torch_random_seed=0,
        fewshot_random_seed=0,
        log_samples=False,
    )
    for name in NAMES:
        results = {key.removesuffix(",none"): value for key, value in actual["results"][name].items()}
        for metric, value in alone[name].items():
            if metric in results and isinstance(results[metric], float):
                assert value == pytest.approx(results[metric], rel=1e-4), (name, metric)
    assert alone["own_choice"]["acc"] not in (0.0, 1.0)
