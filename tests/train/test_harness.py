"""Tasks of the lm-evaluation-harness on our model: the harness's own code runs, on data that lies in a folder."""

from __future__ import annotations

import importlib.util
import json
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from nxtrain.backends.cpu import CpuBackend
from nxtrain.checkpoint.convert.hf import hf_to_nxtrain
from nxtrain.common import hf_files
from nxtrain.common.distributed.agreement import Ranks
from nxtrain.common.mesh import Mesh
from nxtrain.data.tokenization import train_bpe
from nxtrain.tools.eval import harness, suites
from nxtrain.tools.eval import scorer as scorers
from nxtrain.tools.eval.generate import Continuation, Sampling, extend
from nxtrain.tools.eval.offline import OFFLINE
from nxtrain.tools.eval.scorer import Scorer, windows
from nxtrain.tools.eval.suites import RECIPE
from nxtrain.tools.eval.trained import Trained
from tests.support.commands import errors_of, in_process, output_of
from tests.support.models import LENGTH, TEXT, continued, text_model
from tests.train.conftest import write_tasks

pytest.importorskip("lm_eval", reason='no lm_eval: pip install ".[eval]", which .[dev] holds')

QUESTIONS = [
    {"question": "the quick", "choices": [" brown", " fox", "na\xefve caf\xe9"], "gold": 0},
    {"question": "caf\xe9 \u4f60\u597d, ", "choices": ["\u4e16\u754c", "the"], "gold": 0},
    {"question": "brown fox " * 40, "choices": ["the", " quick brown"], "gold": 0},
]

TASKS = {
    "choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: gold
doc_to_choice: "{{choices}}"
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}} the end of it"
metric_list: [{metric: bits_per_byte}, {metric: word_perplexity}]
""",
    "writing": """
output_type: generate_until
doc_to_text: "{{question[:12]}}"
doc_to_target: "fox"
generation_kwargs: {until: ["fox"], max_gen_toks: 9}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pytest.MonkeyPatch]:
    """A hub that is never asked, and a cache of data sets that goes with the tests."""
    with pytest.MonkeyPatch.context() as patch:
        import datasets.config

        patch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield patch


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory, offline: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    write_tasks(folder, TASKS, QUESTIONS)
    return folder


def open_scorer(model_folder: Path) -> Scorer:
    return Scorer(Trained.find(str(model_folder)), CpuBackend(), Ranks(Mesh(1, 0)))


def likelihood(hf: Path, ids: list[int], num_scored: int) -> float:
    """Log-likelihood of the last tokens in transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32)
    with torch.no_grad():
        scores = model(torch.tensor([ids[:-1]])).logits[0].double().log_softmax(-1)
    return float(sum(scores[at - 1, ids[at]] for at in range(len(ids) - num_scored, len(ids))))


@pytest.mark.filterwarnings("ignore")
def test_whole_texts_are_cut_into_the_windows_of_the_harness(hf: Path) -> None:
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    drawn = random.Random(5)
    for _ in range(50):
        ids, length = [drawn.randrange(300) for _ in range(drawn.randint(1, 90))], drawn.randint(1, 40)
        theirs = [make_disjoint_window(pair) for pair in get_rolling_token_windows(ids, 7, length, 1)]
        ours = [
            (row.ids[: -row.num_scored], row.ids[-row.num_scored :]) for row in windows([7, *ids], len(ids), length)
        ]
        assert ours == [(tuple(context_ids), tuple(scored)) for context_ids, scored in theirs]
    scorer, text = open_scorer(hf), TEXT * 8
    ids = Tokenizer.from_file(str(hf / hf_files.TOKENIZER)).encode(text).ids
    expected = sum(
        likelihood(hf, [*context_ids, *scored], len(scored))
        for context_ids, scored in map(make_disjoint_window, get_rolling_token_windows(ids, scorer.prefix, LENGTH, 1))
    )
    assert len(ids) > LENGTH
    assert scorer.rolling([text, "fox"])[0].nats == pytest.approx(expected, abs=1e-3)


TURN, END, TEXT_END = "<|turn|>", "<|end|>", "<|endoftext|>"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("begin", "end", "added"),
    [(None, TEXT_END, ""), (None, END, ""), (TURN, END, ""), (TURN, TEXT_END, TURN)],
    ids=["the end begins", "the declared end begins", "the beginning is declared", "the tokenizer adds it"],
)
def test_texts_begin_as_with_the_model_of_the_harness(begin: str | None, end: str, added: str, tmp_path: Path) -> None:
    """Also texts that begin with the token that begins a text."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    folder = text_model(tmp_path / "model")
    file = folder / hf_files.TOKENIZER
    train_bpe([TEXT * 50], 290, file)
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in (TURN, END)])
    if added:
        named = [(added, tokenizer.token_to_id(added))]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{added} $A", special_tokens=named)
    tokenizer.save(str(file))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": begin, "eos_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    ours, theirs = open_scorer(folder), HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=1)

    def request(kind: str, *arguments: str) -> Any:
        return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)

    assert ours.prefix == theirs.prefix_token_id
    pairs = [("", "the fox"), ("the quick ", "brown"), (f"{TURN}the", " fox"), (TEXT, END), ("caf\xe9 " * 40, "the")]
    expected = [theirs.loglikelihood([request("loglikelihood", *pair)], disable_tqdm=True)[0][0] for pair in pairs]
    assert [score.nats for score in ours.likelihoods(pairs)] == pytest.approx(expected, abs=1e-3)
    for text in ("the quick", f"{TURN}the", TEXT * 8):
        (expected_sum,) = theirs.loglikelihood_rolling([request("loglikelihood_rolling", text)], disable_tqdm=True)
        assert ours.rolling([text])[0].nats == pytest.approx(expected_sum, abs=1e-3), text


@pytest.mark.filterwarnings("ignore")
def test_a_special_token_stops_a_text_as_with_the_model_of_the_harness(tmp_path: Path) -> None:
    """The token does not end a text of the model, and its name is a stop text of the task."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    folder = text_model(tmp_path / "model")
    file = folder / hf_files.TOKENIZER
    tokenizer = Tokenizer.from_file(str(file))
    (written,) = open_scorer(folder).continuations([("the quick", 12, ())], Sampling(0.0))
    written_ids = tokenizer.encode("the quick" + written).ids[len(tokenizer.encode("the quick").ids) :]
    name = tokenizer.id_to_token(written_ids[5])
    assert name is not None
    tokenizer.add_special_tokens([AddedToken(name, special=True)])
    tokenizer.save(str(file))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": TEXT_END, "pad_token": TEXT_END}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    options = {"until": [name, "zzz"], "max_gen_toks": 12, "do_sample": False}
    request = Instance(request_type="generate_until", doc={}, arguments=("the quick", options), idx=0)
    theirs = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=1)
    expected = theirs.generate_until([request], disable_tqdm=True)
    result = open_scorer(folder).continuations([("the quick", 12, (name, "zzz"))], Sampling(0.0))
    assert (result, len(result[0]) < len(written)) == (expected, True)


def train_metaspace(file: Path) -> Tokenizer:
    """Train a tokenizer like that of Llama 2: a space belongs to the word after it, and begins no text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    parts = [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    special = ["<unk>", TEXT_END]
    indented = ["def f(x):\n    return x\n" * 20]
    trainer = trainers.BpeTrainer(vocab_size=290, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([TEXT] * 50 + indented, trainer)
    tokenizer.save(str(file))
    return tokenizer


@pytest.mark.filterwarnings("ignore")
def test_a_continuation_begins_as_with_the_model_of_the_harness(tmp_path: Path) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    folder = text_model(tmp_path / "model")
    train_metaspace(folder / hf_files.TOKENIZER)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": TEXT_END, "pad_token": TEXT_END}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    ours, theirs = open_scorer(folder), HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=1)
    drawn = random.Random(3)
    prompts = ["".join(drawn.choices(["the", " quick", " brown", "fox", "\n", "def"], k=5)) for _ in range(20)]
    rules = [drawn.choice(((), ("\n",), ("fox", "q"))) for _ in prompts]
    results = ours.continuations(
        [(prompt, 8, rule) for prompt, rule in zip(prompts, rules, strict=True)], Sampling(0.0)
    )
    expected = []
    for prompt, rule in zip(prompts, rules, strict=True):
        options = {"until": list(rule), "max_gen_toks": 8, "do_sample": False}
        request = Instance(request_type="generate_until", doc={}, arguments=(prompt, options), idx=0)
        expected += theirs.generate_until([request], disable_tqdm=True)
    assert results == expected
    extended = [continued(folder, prompt, 8, Sampling(0.0)) for prompt in prompts]
    assert any(f"{prompt} {text}" == whole for prompt, text, whole in zip(prompts, results, extended, strict=True))


@pytest.mark.parametrize(
    ("whole", "text"), [(" fox", "fox"), ("fox", "fox"), ("    return x", "    return x"), ("\n fox", "\n fox")]
)
def test_a_continuation_loses_one_space_and_no_indentation(whole: str, text: str, tmp_path: Path) -> None:
    tokenizer = train_metaspace(tmp_path / "tokenizer.json")
    prompt = tokenizer.encode("the:").ids
    ids = tokenizer.encode("the:" + whole).ids[len(prompt) :]
    for alone, wanted in ((True, text), (False, whole)):
        written = Continuation(prompt, len(ids), tokenizer, alone=alone)
        for token in ids:
            written.add(token)
        assert (written.text, written.ending) == (wanted, "tokens")


@pytest.mark.filterwarnings("ignore")
def test_own_tasks_run_by_the_command_and_go_on_after_a_kill(hf: Path, tasks: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    checkpoint = run / "checkpoints" / "step-00000000"
    hf_to_nxtrain(hf, checkpoint)
    (run / "config.toml").touch()
    names = ",".join(f"own_{name}" for name in TASKS)
    argv = ("eval", checkpoint, "--tasks", names, "--task-dir", tasks, "--json")
    out = output_of(*argv)
    first = json.loads(out)
    assert list(first["tasks"]) == [f"own_{name}" for name in TASKS]
    assert all(metrics["n"] == len(QUESTIONS) for metrics in first["tasks"].values())
    # The answers of a killed evaluation are there, and its result is not.
    (run / "evaluations.jsonl").unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scorer, "_score", lambda *_: pytest.fail("the answers are known"))
        code, out, _ = in_process(*argv)
    assert (code, json.loads(out)) == (0, first)


def test_a_task_that_has_changed_is_another_question(tmp_path: Path, tasks: Path) -> None:
    folder = tmp_path / "tasks"
    shutil.copytree(tasks, folder)
    result = [harness.definition_of("own_choice", folder)]
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "own.pyc").touch()
    assert harness.definition_of("own_choice", folder) == result[0] != ""
    (folder / "choice.yaml").write_text((folder / "choice.yaml").read_text() + "# another\n")
    result.append(harness.definition_of("own_choice", folder))
    (folder / "data.jsonl").write_text("{}\n")
    result.append(harness.definition_of("own_choice", folder))
    (folder / "own.py").write_text("X = 1\n")
    result.append(harness.definition_of("own_choice", folder))
    assert len(set(result)) == 4
    identities = {harness.HarnessTask("own_choice", 0, 0, 0, Any, item).identity for item in result}
    assert len(identities) == 4
    assert harness.definition_of("quac", None) and not harness.definition_of("hellaswag", folder)


@pytest.mark.filterwarnings("ignore")
def test_an_unknown_task_is_named_with_the_nearest(hf: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_registry = harness._registry
    # The harness's own tasks take seconds to read.
    monkeypatch.setattr(harness, "_registry", lambda folder, own_only: open_registry(folder, own_only=True))
    err = errors_of("eval", hf, "--tasks", "own_choise,clozer", "--task-dir", tasks, code=2)
    assert "own_choise is not a task of nxtrain or of the harness" in err
    assert "did you mean own_choice?" in err
    assert "did you mean cloze?" in err


@pytest.mark.filterwarnings("ignore")
def test_a_name_that_no_file_has_is_refused_without_the_registry(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = harness._registry(tasks, own_only=False)  # by the harness itself
    possible = harness.possible_names(tasks)
    assert not set(registry.all_tasks) - possible
    monkeypatch.setattr(suites, "open_registry", mock.Mock(side_effect=AssertionError("seconds")))
    code, _, err = in_process("eval", "absent", "--tasks", "hellasswag,own_choice", "--task-dir", tasks)
    assert (code, "did you mean hellaswag?" in err) == (2, True), err
    out = output_of("eval", "absent", "--tasks", "list")
    assert {*suites.SUITES, *OFFLINE} <= {*out.replace(",", " ").split()}
    assert "lm_eval ls tasks" in out


def test_names_with_spaces_are_found(tasks: Path, tmp_path: Path) -> None:
    """As `include_base_44_north macedonian`, which lm_eval 0.4.11 has."""
    text = (tasks / "choice.yaml").read_text()
    for number, name in enumerate(("own plain", "'own quoted'", '"own twice quoted"', "own noted  # a note")):
        (tmp_path / f"{number}.yaml").write_text(text.replace("own_choice", name))
    (tmp_path / "group.yaml").write_text("group: own group\ntask: [own plain, 'own quoted']\n")
    expected = {"own plain", "own quoted", "own twice quoted", "own noted", "own group"}
    assert expected <= {*harness._registry(tmp_path, own_only=True).all_tasks}
    assert expected <= harness.possible_names(tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_names_like_none_get_no_list_of_thousands(hf: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context_ids = [f"zz{number}" for number in range(5000)]
    monkeypatch.setattr(harness, "_registry", lambda folder, own_only: mock.Mock(all_tasks=context_ids))
    monkeypatch.setattr(suites, "possible_names", lambda folder: frozenset(context_ids))
    err = errors_of("eval", hf, "--tasks", "quite_another", code=2)
    assert "known: held_out, cloze" in err and "of the harness: lm_eval ls tasks" in " ".join(err.split())
    assert len(err) < 500
    code, _, err = in_process("eval", hf, "--tasks", "zz3,zz4:1,zz3:2")
    assert (code, "zz3 is chosen with its own number of solved examples and with 2 solved" in err) == (2, True), err


@pytest.mark.filterwarnings("ignore")
def test_groups_and_tags_without_a_mean_have_the_metrics_of_their_tasks(hf: Path, tasks: Path, tmp_path: Path) -> None:
    for file in tasks.iterdir():
        shutil.copy(file, tmp_path)
    text = (tmp_path / "choice.yaml").read_text()
    (tmp_path / "tagged.yaml").write_text(text.replace("own_choice", "own_tagged") + "tag: own_tag\n")
    (tmp_path / "group.yaml").write_text("group: own_group\ntask: [own_choice, own_writing]\n")
    names = "own_choice,own_writing,own_tag,own_group"
    out = output_of("eval", hf, "--tasks", names, "--task-dir", tmp_path, "--json")
    result = json.loads(out)["tasks"]
    choice, writing = result["own_choice"], result["own_writing"]
    assert result["own_tag"]["own_tagged_acc"] == choice["acc"]
    assert result["own_tag"]["stderr"] == choice["stderr"]
    group = result["own_group"]
    assert (group["own_choice_acc"], group["own_writing_exact_match"]) == (choice["acc"], writing["exact_match"])
    assert (next(iter(group)), group["n"], group["stderr"]) == ("own_choice_acc", 2 * len(QUESTIONS), choice["stderr"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("{{question}}", "{{nothing}}", "UndefinedError: 'nothing' is undefined"),
        ("data.jsonl", "empty.jsonl", "StopIteration"),
        ("data.jsonl", "gone.jsonl", "gone.jsonl"),
        ("output_type", "x_type", ""),
    ],
)
def test_a_task_at_fault_is_told_without_a_traceback(
    hf: Path, tasks: Path, tmp_path: Path, old: str, new: str, words: str
) -> None:
    (tmp_path / "data.jsonl").write_text((tasks / "data.jsonl").read_text())
    (tmp_path / "empty.jsonl").touch()
    text = (tasks / "choice.yaml").read_text().replace(str(tasks), str(tmp_path))
    assert old in text
    (tmp_path / "choice.yaml").write_text(text.replace(old, new))
    code, _, err = in_process("eval", hf, "--tasks", "own_choice", "--task-dir", tmp_path)
    said = " ".join(err.split())
    assert (code, "--tasks own_choice: the harness cannot run this: " in said) == (3, True), err
    assert words in said and "check the task's files" in said, err


@pytest.mark.filterwarnings("ignore")
def test_a_folder_of_answers_that_cannot_be_made_is_named(hf: Path, tasks: Path, tmp_path: Path) -> None:
    (tmp_path / "evaluations").touch()
    task = harness.HarnessTask("own_choice", None, 0, 0, harness.open_registry(["own_choice"], tasks))
    with pytest.raises(FileExistsError, match="evaluations"):
        task.run(open_scorer(hf), tmp_path / "evaluations")


@pytest.mark.filterwarnings("ignore")
def test_a_text_that_a_killed_task_has_written_is_not_written_again(
    hf: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = list[str]()

    def dying(decoder: Any, texts: Any, sampling: Any) -> Iterator[tuple[int, str]]:
        if len(written) == 2:
            written.append("killed")
            raise KeyboardInterrupt
        written.extend(text.prompt for text in texts)
        return extend(decoder, texts, sampling)

    monkeypatch.setattr(scorers, "MAX_ROWS", 1)
    monkeypatch.setattr(scorers, "extend", dying)
    task = harness.HarnessTask("own_writing", None, 0, 0, harness.open_registry(["own_writing"], tasks))
    with pytest.raises(KeyboardInterrupt):
        task.run(open_scorer(hf), tmp_path)
    task.run(open_scorer(hf), tmp_path)
    assert len(written) == len(set(written)) == len(QUESTIONS) + 1


@pytest.mark.filterwarnings("ignore")
def test_an_error_of_the_model_is_not_laid_on_the_task(hf: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nxtrain.tools.eval.scorer._judge", mock.Mock(side_effect=ValueError("of the model")))
    task = harness.HarnessTask("own_choice", None, 0, 0, harness.open_registry(["own_choice"], tasks))
    with pytest.raises(ValueError, match="of the model"):
        task.run(open_scorer(hf), None)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", [-1, 2**63 - 1])
def test_every_seed_of_the_command_is_one_of_the_harness(hf: Path, tasks: Path, seed: int) -> None:
    output_of("eval", hf, "--tasks", "own_choice:1", "--task-dir", tasks, "--seed", seed)


NAMES = {task for suite in RECIPE.values() for task in suite}


def test_files_of_the_harness_name_the_tasks_of_the_recipe() -> None:
    folder = Path(importlib.util.find_spec("lm_eval").submodule_search_locations[0], "tasks")  # type: ignore[union-attr,index]
    folders = (*(folder / part for part in FOLDERS), harness.OWN_TASKS)
    texts = (file.read_text(encoding="utf-8") for item in folders for file in item.rglob("*.yaml"))
    named = {name for text in texts for name in re.findall(r"^(?:task|group): ([\w-]+)$", text, re.MULTILINE)}
    assert NAMES - named == set()


FOLDERS = (
    *("mmlu/default", "bbh/cot_fewshot", "piqa", "siqa", "hellaswag", "winogrande", "arc", "openbookqa"),
    *("commonsense_qa", "nq_open", "triviaqa", "squadv2", "super_glue/boolq", "gsm8k", "hendrycks_math"),
    *("humaneval", "mbpp"),
)
"""Folders of the harness's tasks; to read all of them takes seconds."""
