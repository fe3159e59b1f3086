"""Text that is trained on has the ids that the weights know, wherever the weights come from; another id is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from nxtrain.checkpoint import directory
from nxtrain.checkpoint.convert.hf import hf_to_nxtrain, nxtrain_to_hf
from nxtrain.checkpoint.meta import read_meta
from nxtrain.common.errors import CheckpointError, DataError
from nxtrain.common.run_folder import CHECKPOINTS_DIR
from nxtrain.common.vocab import ID_MASK
from nxtrain.config.show import dump
from nxtrain.data.arrow.prepared import PreparedCorpus
from nxtrain.data.arrow.token_stream import MARKED
from nxtrain.tools.eval.generate import Sampling
from tests.support.commands import errors_of
from tests.support.models import continued, hf_model, plan
from tests.support.runs import course, run_plan, token_file

VOCAB = 300
WORDS = ("alpha", "beta", "gamma", "delta")


def word_tokenizer(path: Path, words: tuple[str, ...] = WORDS, first: int = 5) -> Tokenizer:
    """A tokenizer of a few words with ids of its own, whose documents end with a name that nobody would guess."""
    vocabulary = {"<unk>": 0, "<end>": 1, **{word: first + number for number, word in enumerate(words)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    path.with_name("tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return tokenizer


class Runs:
    """`nxtrain train` on text, in this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        random = np.random.default_rng(0)
        self.texts = [" ".join(random.choice(WORDS, size=60)) for _ in range(8)]
        (folder / "text").mkdir()
        for number, text in enumerate(self.texts):
            (folder / f"text/{number}.txt").write_text(text)
        shape = plan("gqa2", model={"config": {"vocab_size": VOCAB}})
        hf_model(shape).save_pretrained(folder / "hf")
        self.tokenizer = word_tokenizer(folder / "hf/tokenizer.json")
        hf_to_nxtrain(folder / "hf", folder / "converted")
        data = {"source": "text", "path": str(folder / "text")}
        model = {"config": {"vocab_size": VOCAB}}
        steps = {"steps": 2, "checkpoint": {"every": 1}, "backend": {"name": "cpu"}, "model": model}
        resolved = run_plan(folder / "run", data, **steps)  # type: ignore[arg-type]
        (folder / "config.toml").write_text(dump(resolved.config))

    @property
    def of_hf(self) -> tuple[str, ...]:
        return f"model.hf={self.folder}/hf", "model.init=hf"

    @property
    def of_checkpoint(self) -> tuple[str, ...]:
        return (f"checkpoint.resume={self.folder}/converted",)

    def train(self, *overrides: str, name: str = "run", code: int = 0) -> str:
        """Standard error of the run, in one line; the run ends with an exit code."""
        config = (self.folder / "config.toml", f"run.dir={self.folder / name}")
        return " ".join(errors_of("train", *config, *overrides, code=code).split())

    def ids(self, name: str = "run") -> list[int]:
        """Token ids that a run has prepared."""
        (file,) = (self.folder / name / "data").glob("train-*.arrow")
        corpus = PreparedCorpus(file)
        ids = np.frombuffer(corpus.values(0, corpus.value_bytes), MARKED)
        return [int(number) & ID_MASK for number in ids]

    def checkpoint(self, step: int, name: str = "run") -> Path:
        return directory.step_path(self.folder / name / CHECKPOINTS_DIR, step)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return Runs(tmp_path)


def test_text_gets_the_ids_of_the_weights_and_so_do_all_that_go_on_from_them(runs: Runs) -> None:
    output = runs.train(*runs.of_hf, "train.steps=1", "optim.decay_steps=2")
    assert f"the tokenizer is that of model.hf={runs.folder}/hf, whose ids the weights know" in output
    assert runs.ids() == [number for text in runs.texts for number in (*runs.tokenizer.encode(text).ids, 1)]
    assert (runs.checkpoint(1) / "tokenizer.json").read_bytes() == (runs.folder / "hf/tokenizer.json").read_bytes()
    assert read_meta(runs.checkpoint(1)).end_of_text == "<end>"
    output = runs.train(*runs.of_hf)
    assert "continues after step 1" in output

    # The same weights by way of a checkpoint: the same ids, so the same losses.
    output = runs.train(*runs.of_checkpoint, "train.steps=1", "optim.decay_steps=2", name="other")
    assert f"the tokenizer is that of checkpoint.resume={runs.folder}/converted, whose ids" in output
    output = runs.train(name="other")
    assert "continues after step 1" in output
    assert runs.ids("other") == runs.ids()
    assert course(runs.folder / "other") == course(runs.folder / "run")


def test_a_conversion_carries_the_tokenizer_and_the_end_of_its_documents(runs: Runs) -> None:
    meta = read_meta(runs.folder / "converted")
    assert (meta.step, meta.end_of_text) == (0, "<end>")
    assert meta.tokenizer_fingerprint
    nxtrain_to_hf(runs.folder / "converted", runs.folder / "back")
    assert (runs.folder / "back/tokenizer.json").read_bytes() == (runs.folder / "hf/tokenizer.json").read_bytes()


@pytest.mark.parametrize("source", ["of_hf", "of_checkpoint"])
def test_another_tokenizer_is_refused_unless_it_is_allowed(runs: Runs, source: str) -> None:
    word_tokenizer(runs.folder / "other/tokenizer.json", first=50)
    named = (*getattr(runs, source), f"data.tokenizer={runs.folder}/other")
    output = runs.train(*named, code=CheckpointError.exit_code)
    assert "fingerprint is '" in output
    assert 'checkpoint.allow_drift=["tokenizer"]' in output
    assert "data.tokenizer out" in output
    assert not runs.checkpoint(1).exists()
    runs.train(*named, 'checkpoint.allow_drift=["tokenizer"]')
    assert min(set(runs.ids()) - {1}) == 50
    runs.train(*getattr(runs, source), f"data.tokenizer={runs.folder}/hf", name="same")


def test_a_conversion_without_a_fingerprint_is_held_to_its_tokenizer_too(runs: Runs) -> None:
    """As those that an earlier version has written."""
    meta = read_meta(runs.folder / "converted")
    old = meta.model_copy(update={"tokenizer_fingerprint": "", "end_of_text": ""}).sealed()
    (runs.folder / "converted" / directory.META).write_text(old)
    word_tokenizer(runs.folder / "other/tokenizer.json", first=50)
    output = runs.train(*runs.of_checkpoint, f"data.tokenizer={runs.folder}/other", code=CheckpointError.exit_code)
    assert "the tokenizer's fingerprint is" in output


def test_weights_whose_tokenizer_is_not_there_get_none_that_is_trained_on_the_spot(runs: Runs) -> None:
    (runs.folder / "hf/tokenizer.json").rename(runs.folder / "hf/tokenizer.model")
    output = runs.train(*runs.of_hf, code=CheckpointError.exit_code)
    assert "hf has no tokenizer.json (only tokenizer.model, tokenizer_config.json)" in output
    assert "save_pretrained" in output
    assert not list((runs.folder / "run/data").glob("tokenizer*"))
    runs.train(*runs.of_hf, 'checkpoint.allow_drift=["tokenizer"]')


def test_a_checkpoint_that_names_no_tokenizer_goes_on_with_none_that_is_trained_on_the_spot(runs: Runs) -> None:
    rows = token_file(runs.folder / "rows.npy", num_rows=24)
    runs.train("data.source=tokens", f"data.path={rows}")
    output = runs.train(
        'checkpoint.allow_drift=["data"]', "train.steps=3", "optim.decay_steps=2", code=CheckpointError.exit_code
    )
    assert "it names no tokenizer, and the one here was trained on the data" in output
    assert 'checkpoint.allow_drift=["data", "tokenizer"]' in output


def test_ids_of_unknown_origin_may_start_from_any_weights(runs: Runs) -> None:
    rows = token_file(runs.folder / "rows.npy", num_rows=24)
    for name in ("of_hf", "of_checkpoint"):
        output = runs.train(*getattr(runs, name), "data.source=tokens", f"data.path={rows}", name=name)
        assert "the tokenizer is that of" not in output


def test_data_that_grew_keeps_the_tokenizer_of_the_run(runs: Runs) -> None:
    """One that is trained on the spot: more text would train another."""
    runs.train()
    first = (runs.checkpoint(2) / "tokenizer.json").read_bytes()
    (runs.folder / "text/9.txt").write_text("omega psi chi phi upsilon tau sigma " * 30)
    runs.train('checkpoint.allow_drift=["data"]', "train.steps=3", "optim.decay_steps=2")
    assert (runs.checkpoint(3) / "tokenizer.json").read_bytes() == first


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(runs: Runs) -> None:
    word_tokenizer(runs.folder / "hf/tokenizer.json", first=VOCAB)
    output = runs.train(*runs.of_hf, code=DataError.exit_code)
    assert f"has ids up to {VOCAB + 3}" in output
    assert f"the model's vocabulary ends at {VOCAB - 1}" in output


def test_a_tokenizer_that_was_changed_in_its_checkpoint_is_not_taken(runs: Runs) -> None:
    word_tokenizer(runs.folder / "converted/tokenizer.json", first=50)
    (runs.folder / "converted/tokenizer_config.json").unlink()
    output = runs.train(*runs.of_checkpoint, code=CheckpointError.exit_code)
    assert "the tokenizer's fingerprint is" in output


def test_generation_ends_where_the_tokenizer_of_the_weights_ends_a_text(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sampling, "draw", lambda *args: 1)  # the id of <end>
    assert continued(runs.folder / "converted", "alpha beta", 5, Sampling()) == "alpha beta"
