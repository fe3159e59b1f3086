"""Our own tasks of the harness: pass@k of sampled programs, and QuAC; on local rows with the columns of the hub's."""

from __future__ import annotations

import importlib
import json
import random
import resource
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason='no lm_eval: pip install ".[eval]", which .[dev] holds')

from nxtrain.backends.cpu import CpuBackend
from nxtrain.common.distributed.agreement import Ranks
from nxtrain.common.errors import DataError
from nxtrain.common.mesh import Mesh
from nxtrain.tools.eval import harness
from nxtrain.tools.eval.generate import Sampling
from nxtrain.tools.eval.scorer import Scorer
from nxtrain.tools.eval.tasks import passes, quac
from nxtrain.tools.eval.trained import Trained
from tests.support.models import text_model

PROBLEMS: list[dict[str, Any]] = [
    {
        "task_id": f"local/{name}",
        "prompt": f"def {name}(x):\n",
        "canonical_solution": right,
        "test": f"def check(candidate):\n    assert candidate(3) == {value}\n",
        "entry_point": name,
    }
    for name, right, value in (("twice", "    return 2 * x\n", 6), ("square", "    return x * x\n", 9))
]

DIALOGUE: dict[str, Any] = {
    "dialogue_id": "a",
    "wikipedia_page_title": "Snow",
    "background": "",
    "section_title": "Colour",
    "context": "Fresh snow is white. Old snow is grey. CANNOTANSWER",
    "turn_ids": ["a0", "a1", "a2", "a3"],
    "questions": ["What colour is snow?", "And old snow?", "Is it warm?", "Which words?"],
    "followups": [2, 2, 2, 2],
    "yesnos": [2, 2, 2, 2],
    "answers": {
        "texts": [
            ["white", "Fresh snow is white"],
            ["Old snow is grey."],
            ["CANNOTANSWER", "CANNOTANSWER", "white"],
            ["one two", "three four"],
        ],
        "answer_starts": [[14, 0], [21], [40, 40, 14], [0, 0]],
    },
    "orig_answers": {
        "texts": ["Fresh snow is white", "Old snow is grey.", "CANNOTANSWER", "one two"],
        "answer_starts": [0, 21, 40, 0],
    },
}


class FakeScorer:
    """A fake of the model: texts by a table, the same for equal texts in order."""

    def __init__(self, table: dict[str, Sequence[str]]) -> None:
        self.table = table
        self.asked: list[tuple[str, int, Sampling]] = []

    def continuations(
        self,
        requests: Sequence[tuple[str, int, tuple[str, ...]]],
        sampling: Sampling,
        done: Callable[[int, str], None],
        *,
        seed: int = 0,
    ) -> list[str]:
        seen: dict[str, Iterator[str]] = {text: iter(answers) for text, answers in self.table.items()}
        self.asked += [(text, count, sampling) for text, count, _ in requests]
        texts = [next(seen[text]) for text, _, _ in requests]
        for number, text in enumerate(texts):
            done(number, text)
        return texts


class Judge:
    """A judge with the interface of the hub's metric `code_eval`, which has no copy on this machine.

    A program and its test run in a process of their own, with limits of time and memory, without the environment, in
    an empty folder. They pass if the process gets to the end of the test, where it prints a word of the judge.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._known = folder, dict[str, bool]()

    def compute(self, references: list[str], predictions: list[list[str]], k: list[int]) -> Any:
        assert (len(references), len(predictions), k) == (1, 1, [1])
        result = [
            (number, {"passed": self.passes(f"{program}\n{references[0]}"), "completion_id": number})
            for number, program in enumerate(predictions[0])
        ]
        return {"pass@1": 0.0}, {0: result}

    def passes(self, program: str) -> bool:
        if program not in self._known:
            word = secrets.token_hex(16)
            file = self._folder / f"{len(self._known)}.py"
            file.write_text(f"{program}\nprint({word!r})\n", encoding="utf-8")
            with tempfile.TemporaryDirectory(dir=self._folder) as empty, suppress(subprocess.TimeoutExpired):
                done = subprocess.run(
                    [sys.executable, "-I", str(file)],
                    cwd=empty,
                    env={},
                    capture_output=True,
                    preexec_fn=self._limit,
                    timeout=60,
                    check=False,
                )
                self._known[program] = done.returncode == 0 and done.stdout.endswith(f"{word}\n".encode())
        return self._known.setdefault(program, False)

    @staticmethod
    def _limit() -> None:
        for kind, most in ((resource.RLIMIT_CPU, 3), (resource.RLIMIT_AS, 1 << 30), (resource.RLIMIT_FSIZE, 1 << 20)):
            resource.setrlimit(kind, (most, most))


@pytest.mark.parametrize(
    ("body", "passes"),
    [
        ("return 2 * x", True),
        ("print('noise'); return 2 * x", True),
        ("return 3 * x", False),
        ("while True: pass", False),
        ("return 'x' * (1 << 40)", False),
        ("raise SystemExit(0)", False),
        ("import os; os._exit(0)", False),
        ("return (", False),
    ],
)
def test_the_judge_passes_programs_that_reach_the_end_of_their_test(tmp_path: Path, body: str, passes: bool) -> None:
    assert Judge(tmp_path).passes(f"def f(x):\n    {body}\nassert f(3) == 6\n") is passes


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A hub that is never asked, and a cache of data sets that goes with the test."""
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return monkeypatch


def local(
    folder: Path, name: str, splits: Sequence[str], rows: Sequence[dict[str, Any]], *keys: str
) -> harness.HarnessTask:
    """Our task on rows of a file: its YAML is included, and the place of the data is another, as are given keys."""
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    yaml = f"include: {harness.OWN_TASKS}/{name}.yaml\ntask: local_{name}\ndataset_path: json\n"
    files = ", ".join(f"{split}: {folder}/rows.jsonl" for split in splits)
    yaml += f"dataset_kwargs: {{data_files: {{{files}}}}}\n"
    (folder / "local.yaml").write_text("\n".join([yaml, *keys]), encoding="utf-8")
    names = [f"local_{name}"]
    return harness.HarnessTask(names[0], 0, 0, 0, harness.open_registry(names, folder))


REPEATS = 24
SAMPLED = {"prompt": "def same(x):\n    return x  # ", "canonical_solution": "", "entry_point": "same"} | {
    "task_id": "local/same",
    "test": "def check(candidate):\n    assert candidate(3) == 3\n",
}
"""A problem that a model solves by writing anything that ends with its line."""


@pytest.mark.filterwarnings("ignore")
def test_samples_of_a_real_model_are_run_by_a_real_judge(offline: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import evaluate

    offline.setattr(evaluate, "load", lambda metric: {"code_eval": Judge(tmp_path)}[metric])
    offline.setenv(harness.CODE_VARIABLE, "1")
    (tmp_path / "hf").mkdir()
    scorer = Scorer(Trained.find(str(text_model(tmp_path / "hf"))), CpuBackend(), Ranks(Mesh(1, 0)))
    written: list[str] = []
    ask = scorer.continuations

    def continuations(*args: Any, **options: Any) -> list[str]:
        written.extend(texts := ask(*args, **options))
        return texts

    offline.setattr(scorer, "continuations", continuations)
    result = local(tmp_path, "humaneval_pass_at_1", ["test"], [SAMPLED], f"repeats: {REPEATS}").run(scorer, None)
    # The texts differ between kinds of CPU, so another judge runs what was written instead of a table of answers.
    programs = [f"{SAMPLED['prompt']}{text}" for text in written]
    (tmp_path / "again").mkdir()
    judge = Judge(tmp_path / "again")
    right = sum(judge.passes(f"{program}\n{SAMPLED['test']}\ncheck(same)\n") for program in programs)
    assert len(programs) == REPEATS
    assert len(set(programs)) > 2
    assert 0 < right < REPEATS, "the draw shows nothing"
    assert result["pass@1_programs"] == pytest.approx(right / REPEATS)


@pytest.mark.filterwarnings("ignore")
def test_programs_are_refused_until_the_user_allows_them(offline: pytest.MonkeyPatch, tmp_path: Path) -> None:
    offline.delenv(harness.CODE_VARIABLE, raising=False)
    model: Any = FakeScorer({})
    with pytest.raises(DataError, match="unsafe"):
        local(tmp_path, "humaneval_pass_at_k", ["test"], PROBLEMS).run(model, None)
    assert not model.asked


def test_the_estimate_is_the_mean_over_all_draws() -> None:
    for n in range(1, 8):
        for c in range(n + 1):
            for k in range(1, n + 1):
                draws = list(combinations([True] * c + [False] * (n - c), k))
                assert passes.estimate(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))
    with pytest.raises(ValueError, match=r"pass@10 needs 10 samples"):
        passes.estimate(9, 9, 10)


@pytest.mark.filterwarnings("ignore")
def test_answers_of_a_dialogue_are_scored_over_their_words(offline: pytest.MonkeyPatch, tmp_path: Path) -> None:
    head = f"TITLE: Snow - Colour\nPARAGRAPH: {DIALOGUE['context']}\n\n"
    first = "Q: What colour is snow?\n\nA: Fresh snow is white\n\n"
    second = "Q: And old snow?\n\nA: Old snow is grey.\n\n"
    table: dict[str, Sequence[str]] = {
        f"{head}Q: What colour is snow?\n\nA:": [" The snow, white"],
        f"{head}{first}Q: And old snow?\n\nA:": [" old snow is GREY\nQ: and"],
        f"{head}{first}{second}Q: Is it warm?\n\nA:": [" no"],
    }
    model: Any = FakeScorer(table)
    result = local(tmp_path, "quac", ["train", "validation"], [DIALOGUE]).run(model, None)
    # People agree by 0.4 on the first question, and by nothing on the last one, which does not count.
    assert [text for text, _, _ in model.asked] == list(table)
    assert result["n"] == 3
    assert result["f1"] == pytest.approx(((2 / 3 + 2 / 3) / 2 + 1 + 0) / 3)


WORDS = ("The", "snow", "white.", "a", "old", "SNOW", "grey,", "it's", "an", "its", "(white)", "colour", "--", "warm")
"""Words with cases, articles and punctuation that a metric has to pass over."""


def drawn_answer(drawn: random.Random) -> str:
    """An answer with at least one word that counts."""
    if drawn.random() < 0.2:
        return quac.NO_ANSWER
    return " ".join([*drawn.choices(WORDS, k=drawn.randint(0, 4)), drawn.choice(("snow", "white", "grey"))])


def harness_f1(one: str, other: str) -> float:
    """F1 of two answers by the harness's copy of SQuAD's script."""
    from lm_eval.tasks.qasper import metrics

    return float(metrics.f1_abstractive([one], [other]))


@pytest.fixture
def coqa(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """CoQA of the harness, whose metric leaves out each answer of people in turn, as QuAC's does.

    The module takes F1 from a module of transformers that release 5 lacks; here it takes F1 from the harness itself.
    """
    metrics: Any = ModuleType("squad_metrics")
    metrics.compute_f1, metrics.compute_exact = harness_f1, str.__eq__
    for name in ("transformers.data.metrics", "transformers.data.metrics.squad_metrics"):
        monkeypatch.setitem(sys.modules, name, metrics)
    monkeypatch.setattr(metrics, "squad_metrics", metrics, raising=False)
    monkeypatch.setattr("transformers.data.metrics", metrics, raising=False)
    monkeypatch.delitem(sys.modules, "lm_eval.tasks.coqa.utils", raising=False)
    return importlib.import_module("lm_eval.tasks.coqa.utils")


@pytest.mark.filterwarnings("ignore")
def test_the_metric_of_a_drawn_corpus_is_that_of_the_harness(
    offline: pytest.MonkeyPatch, coqa: ModuleType, tmp_path: Path
) -> None:
    """Mean and standard error over the questions of drawn dialogues, by the harness's functions on our answers."""
    from lm_eval.api.metrics import mean, mean_stderr

    drawn = random.Random(4)
    dialogues, wanted, table, num_questions = [], list[float](), dict[str, Sequence[str]](), 0
    for number in range(12):
        texts = [[drawn_answer(drawn) for _ in range(drawn.randint(1, 5))] for _ in range(drawn.randint(1, 5))]
        dialogues.append(
            DIALOGUE
            | {"context": f"Section {number}. CANNOTANSWER", "questions": [f"Which {n}?" for n in range(len(texts))]}
            | {"answers": {"texts": texts, "answer_starts": [[0] * len(text) for text in texts]}}
            | {"orig_answers": {"texts": [text[0] for text in texts], "answer_starts": [0] * len(texts)}}
        )
        before = f"TITLE: Snow - Colour\nPARAGRAPH: Section {number}. CANNOTANSWER\n\n"
        for turn, given in enumerate(texts):
            num_questions += 1
            spans = [given_item for given_item in given if given_item != quac.NO_ANSWER]
            kept = spans if len(spans) > len(given) - len(spans) else [quac.NO_ANSWER]
            others = [(kept_part, kept[:at] + kept[at + 1 :]) for at, kept_part in enumerate(kept)]
            people = [max((harness_f1(one, other) for one in rest), default=1.0) for other, rest in others]
            if mean(people) >= 0.4:
                answer = drawn_answer(drawn)
                table[f"{before}Q: Which {turn}?\n\nA:"] = [f" {answer}"]
                wanted.append(coqa.compute_scores(kept, answer)["f1"])
            before += f"Q: Which {turn}?\n\nA: {given[0]}\n\n"
    model: Any = FakeScorer(table)
    actual = local(tmp_path, "quac", ["train", "validation"], dialogues).run(model, None)
    assert 10 < len(wanted) < num_questions, "the draw leaves out some questions"
    assert actual["n"] == len(wanted)
    assert actual["f1"] == pytest.approx(mean(wanted), abs=1e-12)
    assert actual["stderr"] == pytest.approx(mean_stderr(wanted), abs=1e-12)
