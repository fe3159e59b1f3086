"""`nxtrain eval` scores as transformers does, goes on after a kill, and divides its work over ranks without a trace."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from nxtrain.backends.base import Backend
from nxtrain.backends.cpu import CpuBackend
from nxtrain.checkpoint import directory
from nxtrain.checkpoint.convert.hf import hf_to_nxtrain
from nxtrain.common.distributed.agreement import Ranks
from nxtrain.common.errors import CheckpointError, ConfigError
from nxtrain.common.mesh import Mesh
from nxtrain.common.process.progress import Progress
from nxtrain.common.run_folder import EVALUATIONS_FILE
from nxtrain.tools.eval import harness, scorer
from nxtrain.tools.eval.generate import Continuation, Sampling, extend
from nxtrain.tools.eval.offline import OFFLINE
from nxtrain.tools.eval.scorer import Likelihood, Row, Scorer
from nxtrain.tools.eval.task import Task
from nxtrain.tools.eval.trained import Trained
from tests.support import commands
from tests.support.commands import in_process, output_of
from tests.support.models import DRAWN_FAMILIES, LENGTH, TEXT, text_model
from tests.support.processes import free_port, rank_variables
from tests.support.ranks import RankPool
from tests.support.runs import run_plan, train_rank

DRAWN = random.Random(11)
PAIRS = [
    ("".join(DRAWN.choices("the quick fox, \u4f60\U0001f642", k=DRAWN.choice([0, 1, 9, 40]))), DRAWN.choice(CONTINUED))
    for CONTINUED in [[" fox", "s", " jumps\nover", "brown fox " * 12]]
    for _ in range(60)
]
"""Contexts and continuations, some of them empty, joined by the tokenizer, or beyond the model's length."""


@pytest.fixture
def run(hf: Path, tmp_path: Path) -> Path:
    hf_to_nxtrain(hf, tmp_path / "run" / "checkpoints" / "step-00000000")
    (tmp_path / "run" / "config.toml").touch()
    return tmp_path / "run"


def open_scorer(model_folder: Path, backend: Backend | None = None, tp: int = 1) -> Scorer:
    backend = backend or CpuBackend()
    mesh = Mesh.build(backend.world, backend.rank, tp=tp)
    backend.lay_out(mesh)
    return Scorer(Trained.find(str(model_folder)), backend, Ranks(mesh, backend.host_group))


@pytest.mark.parametrize("shape", ["mha", "gqa2", "odd", "llama3-rope", "yarn-rope", *DRAWN_FAMILIES])
def test_log_likelihoods_are_those_of_transformers(shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of drawn lengths in batches of drawn sizes, whose padding reaches no score."""
    from transformers import AutoModelForCausalLM

    drawn = random.Random(shape)
    model_folder = text_model(tmp_path, shape)
    monkeypatch.setattr(scorer, "MAX_ROWS", drawn.choice([1, 3, 8]))
    monkeypatch.setattr(scorer, "LOGITS", 300 * drawn.choice([1, 9, 50, 1000]))
    # The default for experts asks for widths in multiples of 16 bytes.
    form: Any = {"dtype": torch.float32, "experts_implementation": "eager"}
    ours, theirs = open_scorer(model_folder), AutoModelForCausalLM.from_pretrained(model_folder, **form)
    groups = []
    for _ in range(12):
        ids = tuple(drawn.randrange(300) for _ in range(drawn.randint(2, LENGTH + 1)))
        groups.append([Row(ids, drawn.randint(1, len(ids) - 1))])
    for (row,), actual in zip(groups, ours.of_rows(groups), strict=True):
        with torch.no_grad():
            scores = theirs(torch.tensor([row.ids[:-1]])).logits[0, -row.num_scored :].double()
        targets = torch.tensor(row.ids[-row.num_scored :])
        expected = scores.log_softmax(-1).gather(1, targets[:, None]).sum()
        assert actual.nats == pytest.approx(float(expected), abs=1e-3)
        assert actual.is_greedy is bool((scores.argmax(-1) == targets).all())


def test_windows_of_an_extended_model_have_its_original_length(tmp_path: Path) -> None:
    """Dynamic scaling of transformers depends on the length of a row only beyond the original length."""
    ours = open_scorer(text_model(tmp_path, "dynamic-rope"))
    original = 16
    assert (ours.length, ours.model.config.longest_sequence[1]) == (original, 4 * original)
    rows = ours.rows("", "the quick brown fox " * 9)
    assert len(rows) > 1
    assert max(len(row.ids) for row in rows) == original + 1


def test_a_greedy_continuation_is_known_as_such(hf: Path) -> None:
    ours = open_scorer(hf)
    text = Continuation(ours.model.tokenizer.encode("the quick").ids, 6, ours.model.tokenizer)
    for _ in extend(ours._decoder, [text], Sampling(0.0)):
        pass
    ids = (*text.ids, *text.added)
    assert [item.is_greedy for item in ours._score([Row(ids, 6), Row((*ids[:-1], 1 + ids[-1] % 99), 6)])] == [
        True,
        False,
    ]


def test_each_token_of_a_continuation_is_scored_whatever_the_tokenizer_joins(hf: Path) -> None:
    ours = open_scorer(hf)
    encode = ours.model.tokenizer.encode
    for context, continuation in PAIRS:
        rows = ours.rows(context, continuation)
        scored = [token for row in rows for token in row.ids[-row.num_scored :]]
        context_ids = encode(context.rstrip()).ids
        assert scored == encode(context + continuation).ids[len(context_ids) :]
        assert all(len(row.ids) <= LENGTH + 1 for row in rows)


def scored_by_rank(backend: Backend, model_folder: Path, tp: int = 1) -> tuple[list[Likelihood], list[str], int]:
    """Scores and continuations on one rank, with each reported when done, and the number of its batches."""
    ours, batches, reported = open_scorer(model_folder, backend, tp), 0, dict[int, str]()
    compute = ours._score

    def counted(rows: Any) -> list[Likelihood]:
        nonlocal batches
        batches += 1
        return compute(rows)

    ours._score = counted  # type: ignore[method-assign]
    scored = dict[int, Likelihood]()
    result = ours.likelihoods(PAIRS, scored.__setitem__)
    assert [scored[number] for number in range(len(PAIRS))] == result
    requests = [(context, 6, ("x",)) for context, _ in PAIRS if context]
    texts = ours.continuations(requests, Sampling(0.0), reported.__setitem__)
    assert [reported[number] for number in range(len(requests))] == texts
    return result, texts, batches


def test_ranks_share_the_work_and_get_the_same_bits(hf: Path, ranks: RankPool) -> None:
    alone = scored_by_rank(CpuBackend(), hf)
    of_ranks = ranks.run(2, scored_by_rank, hf)
    assert [result[:2] for result in of_ranks] == [alone[:2]] * 2
    assert sum(result[2] for result in of_ranks) == alone[2] > max(result[2] for result in of_ranks)


def test_ranks_that_share_a_model_score_as_one_does(hf: Path, ranks: RankPool) -> None:
    alone = scored_by_rank(CpuBackend(), hf)
    of_ranks = ranks.run(4, scored_by_rank, hf, 2)
    for scores, texts, _ in of_ranks:
        assert [score.nats for score in scores] == pytest.approx([score.nats for score in alone[0]], abs=1e-4)
        assert ([score.is_greedy for score in scores], texts) == ([score.is_greedy for score in alone[0]], alone[1])
    assert [result[2] for result in of_ranks[::2]] == [result[2] for result in of_ranks[1::2]]
    assert sum(result[2] for result in of_ranks[::2]) == alone[2]


def test_a_run_with_a_pipeline_is_evaluated_without_one(ranks: RankPool, tmp_path: Path) -> None:
    """By the command in its own layout, and on two ranks that share the model."""
    (tmp_path / "texts").mkdir()
    for number in range(8):
        text = " ".join(random.Random(number).choices(TEXT.split(), k=60))
        (tmp_path / "texts" / f"{number}.txt").write_text(text, encoding="utf-8")
    data = {"source": "text", "path": str(tmp_path / "texts"), "validation_fraction": 0.3}
    sections: dict[str, Any] = {"model": {"config": {"vocab_size": 300}}, "parallel": {"tp": 1, "pp": 2}}
    ranks.run(2, train_rank, run_plan(tmp_path / "run", data, steps=1, **sections))
    out = output_of("eval", tmp_path / "run", "--tasks", "held_out", "--json")
    result = json.loads(out)
    assert (result["step"], result["texts"]) == (1, "held-out text of the run")
    pairs = [("the quick", " fox"), ("brown fox ", "jumps")]
    alone = open_scorer(tmp_path / "run").likelihoods(pairs)
    for shared in ranks.run(2, likelihoods_by_rank, tmp_path / "run", pairs):
        assert [score.nats for score in shared] == pytest.approx([score.nats for score in alone], abs=1e-4)


def likelihoods_by_rank(backend: Backend, model_folder: Path, pairs: list[tuple[str, str]]) -> list[Likelihood]:
    """Scores of a model that all ranks share."""
    return open_scorer(model_folder, backend, backend.world).likelihoods(pairs)


def see_the_first_checkpoint() -> None:
    """Let a process see a run as it was before its second checkpoint."""
    vars(directory)["newest"] = lambda folder: next(iter(directory.list_checkpoints(folder)), None)


def test_ranks_evaluate_one_checkpoint_of_a_run_that_saves_meanwhile(run: Path, tmp_path: Path) -> None:
    newer = run / "checkpoints" / "step-00000001"
    hf_to_nxtrain(text_model(tmp_path / "hf", "mqa"), newer)
    request = ("--tasks", "held_out,cloze", "--limit", 24, "--json")
    port, ranks = free_port(), list[BaseProcess]()
    for rank, first in enumerate((None, see_the_first_checkpoint)):
        (tmp_path / str(rank)).mkdir()
        environ = rank_variables(rank, 2, port)
        ranks.append(commands.start(tmp_path / str(rank), "eval", run, *request, environ=environ, first=first))
    output = commands.ended(tmp_path, dict(enumerate(ranks)), 60.0)
    shared = json.loads(output[0][output[0].index("{") :])
    assert shared["checkpoint"] == str(newer)
    assert shared["tasks"] == json.loads(output_of("eval", newer, *request))["tasks"]


def refused_by_rank(backend: Backend, folder: Path) -> str:
    """Error of a rank whose checkpoint is not that of the others."""
    found = replace(Trained.find(str(folder)), step=backend.rank, identity=f"of rank {backend.rank}")
    with pytest.raises(CheckpointError) as refusal:
        found.open(backend, 8, Mesh.build(backend.world, backend.rank, tp=backend.world))
    return str(refusal.value)


def test_ranks_make_no_model_of_two_checkpoints(run: Path, ranks: RankPool) -> None:
    found = "the ranks have found different checkpoints: step-00000000, step-00000001; a run may have saved meanwhile"
    assert [text.startswith(found) for text in ranks.run(2, refused_by_rank, run)] == [True, True]


def test_samples_of_one_text_are_independent_and_come_again(hf: Path) -> None:
    ours = open_scorer(hf)
    request = ("the quick", 12, ())
    samples = ours.continuations([request] * 5, Sampling(1.0))
    assert len(set(samples)) == 5
    assert ours.continuations([("x", 3, ()), *[request] * 5], Sampling(1.0))[1:] == samples
    assert not set(ours.continuations([request] * 5, Sampling(1.0), seed=2)) & set(samples)


def test_results_are_a_table_or_json(run: Path) -> None:
    code, out, _ = in_process("eval", run, "--json", "--limit", 4)
    result = json.loads(out)
    assert (code, result["step"], list(result["tasks"])) == (0, 0, list(OFFLINE))
    assert result["checkpoint"] == str(run / "checkpoints" / "step-00000000")
    for name, metrics in result["tasks"].items():
        assert set(metrics) >= {"bits_per_byte" if name == "held_out" else "accuracy", "stderr", "n"}
        assert metrics["n"] == 4
    # Nothing trained the model: it knows as little as a guess among its 300 tokens, or less.
    assert result["tasks"]["held_out"]["bits_per_byte"] > 0.5 * math.log2(300)
    code, out, err = in_process("eval", run, "--limit", 4, "--tasks", "cloze,induction")
    assert (code, len(out.splitlines())) == (0, 3)
    metrics = result["tasks"]["cloze"]
    assert f"accuracy          {metrics['accuracy']:.4f} +- {metrics['stderr']:.4f}" in out
    assert err == "", "the results are in the record"
    code, out, _ = in_process("eval", run, "--all", "--json", "--limit", 4)
    assert (code, json.loads(out)) == (0, [result])


def die_in_the_third_task() -> None:
    """End this process by force when its third task is measured."""
    measure, measured = Task.measure, list[str]()

    def dying(self: Task, likelihoods: Any) -> Any:
        measured.append(self.name)
        if len(measured) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return measure(self, likelihoods)

    Task.measure = dying  # type: ignore[method-assign]


def test_a_killed_evaluation_goes_on_with_the_same_numbers(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "other")
    argv = ("--limit", 5, "--seed", 3, "--json")
    code, said = commands.command(tmp_path, "eval", run, *argv, first=die_in_the_third_task)
    assert code == -signal.SIGKILL, said
    file = run / EVALUATIONS_FILE
    done = file.read_text().splitlines()
    assert [json.loads(line)["task"] for line in done] == [*OFFLINE][:2]
    file.write_text(file.read_text() + '{"torn')
    code, out, err = in_process("eval", run, *argv)
    whole = in_process("eval", tmp_path / "other", *argv)
    assert (code, json.loads(out)["tasks"]) == (0, json.loads(whole[1])["tasks"])
    assert [line.rpartition(" ")[2] for line in err.splitlines()] == [*OFFLINE][2:], "no task is done again"
    assert file.read_text().splitlines()[:2] == done
    # Other seeds and other numbers of requests ask other questions.
    for other in (("--limit", 5, "--seed", 4), ("--limit", 6, "--seed", 3)):
        assert in_process("eval", run, "--tasks", "arithmetic", *other)[2].endswith("arithmetic\n")


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (("--tasks", "clozes"), 2, "did you mean cloze?"),
        (("--tasks", "recip"), 2, "did you mean recipe?"),
        (("--tasks", "piqa"), 2, 'pip install "nxtrain[eval]"'),
        (("--tasks", "piqa:few"), 2, "'few' is not a number"),
        (("--tasks", "cloze:3,recipe:5"), 2, "cloze takes no number of solved examples write cloze error"),
        (("--tasks", "cloze:3,recipe:5"), 2, "recipe takes no number of solved examples write recipe"),
        (("--tasks", " , "), 2, "--tasks ' , ' names no task; give NAME,..., or leave it out for the offline suite"),
        (("--tasks", "cloze", "--task-dir", "/nowhere"), 2, "--task-dir /nowhere is not a folder"),
        (("--limit", 1_000_001), 2, "--limit 1,000,001 is too high: local tasks draw 1,000,000 requests at most"),
        (("--tp", 2), 2, "--tp 2 does not divide the 1 ranks; start a multiple of 2 by torchrun"),
        (("--visible-cores", "0-1"), 5, "--visible-cores is for Neuron devices"),
    ],
)
def test_mistakes_are_told_without_a_traceback(
    hf: Path, argv: tuple[str, ...], code: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nxtrain.tools.eval.suites.is_installed", lambda: False)
    result, _, err = in_process("eval", hf, *argv)
    assert (result, words in " ".join(err.split())) == (code, True), err


def test_places_without_a_model_or_a_tokenizer_are_refused(hf: Path, run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    code, _, err = in_process("eval", tmp_path / "empty")
    assert (code, "holds no complete checkpoint" in err) == (CheckpointError.exit_code, True)
    code, _, err = in_process("eval", hf, "--all")
    assert (code, "has no checkpoints" in err) == (ConfigError.exit_code, True)
    (run / "checkpoints" / "step-00000000" / "tokenizer.json").unlink()
    code, _, err = in_process("eval", run)
    assert (code, "has no tokenizer.json" in err) == (ConfigError.exit_code, True)


@pytest.mark.parametrize("command", [("eval",), ("generate", "--prompt", "x")])
def test_an_adapter_is_told_from_a_model(command: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    code, _, err = in_process(*command, tmp_path)
    assert (code, f"nxtrain convert peft-to-hf {tmp_path} DST" in " ".join(err.split())) == (2, True), err


@pytest.mark.parametrize(
    "metrics",
    [
        {},
        {"accuracy": 0.5},
        {"accuracy": 0.5, "n": 2},
        {"stderr": None, "n": 2},
        {"accuracy": None, "stderr": None, "n": 2},
        {"accuracy": "x", "stderr": None, "n": 2},
        {"accuracy": math.nan, "stderr": None, "n": 2},
        {"accuracy": 0.5, "stderr": "x", "n": 2},
    ],
)
def test_a_spoilt_result_is_measured_again(run: Path, metrics: dict[str, object]) -> None:
    argv = ("eval", run, "--tasks", "cloze", "--limit", 2)
    whole, file = in_process(*argv)[1], run / EVALUATIONS_FILE
    line = json.loads(file.read_text())
    file.write_text(json.dumps({**line, "metrics": metrics}) + "\n")
    code, out, err = in_process(*argv)
    assert (code, out, err.endswith("cloze\n")) == (0, whole, True), err


def test_code_that_a_model_writes_runs_by_consent_only(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval", reason='no lm_eval: pip install ".[eval]", which .[dev] holds')
    asked = mock.Mock(return_value={"results": {"t": {"acc,none": 0.5}}, "n-samples": {}})
    monkeypatch.setattr("lm_eval.evaluator.simple_evaluate", asked)
    monkeypatch.setattr(harness, "adapter", lambda scorer, seed: None)
    task = harness.HarnessTask("t", None, 0, 0, registry=None)
    for value, allowed in (("0", False), ("1", True)):
        monkeypatch.setenv(harness.CODE_VARIABLE, value)
        task.run(None, None)  # type: ignore[arg-type]
        assert asked.call_args.kwargs["confirm_run_unsafe_code"] is allowed


def test_a_long_task_shows_the_share_of_its_rows(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[float, float]] = []
    show = Progress.show

    def shows(progress: Progress, done: float, label: str = "") -> None:
        show(progress, done, label)
        shown.append((done, progress.total))

    monkeypatch.setattr(Progress, "show", shows)
    output_of("eval", run, "--tasks", "arithmetic", "--limit", "20")
    assert [one for one in shown if one[1] == 80] == [(32, 80), (64, 80), (80, 80)]
