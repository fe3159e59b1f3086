"""Tokenizers: trained alike everywhere, lossless, and refused when the model cannot hold them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from nxtrain.common.errors import DataError
from nxtrain.data.tokenization import END_OF_TEXT, load_tokenizer, train_bpe

TEXTS = [f"def function_{i}(argument):\n    return argument + {i * i}\n" for i in range(300)]


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    train_bpe(TEXTS, 320, path)
    return path


def test_training_gives_the_exact_vocabulary_with_end_of_text_first(trained: Path) -> None:
    vocabulary = Tokenizer.from_file(str(trained)).get_vocab()
    assert sorted(vocabulary.values()) == list(range(320))
    assert vocabulary[END_OF_TEXT] == 0
    assert load_tokenizer(trained, 320).end_id == 0


def test_every_text_comes_back_from_its_ids(trained: Path) -> None:
    tokenizer = load_tokenizer(trained, 320)
    texts = [
        *TEXTS[:3],
        " leading and  double  spaces ",
        "snow \u2603, \U0001f600 and \x01",
        f"a {END_OF_TEXT} in text",
    ]
    for text, ids in zip(texts, tokenizer.encode(texts), strict=True):
        assert tokenizer.tokenizer.decode(ids.tolist(), skip_special_tokens=False) == text
        assert tokenizer.end_id not in ids, "text that spells the token must not end a document"


def test_training_is_equal_in_every_process_and_at_every_number_of_threads(trained: Path, tmp_path: Path) -> None:
    code = (
        "import json, sys; from pathlib import Path; from nxtrain.data.tokenization import train_bpe;"
        "train_bpe(json.load(sys.stdin), 320, Path(sys.argv[1]))"
    )
    for parallelism in ("false", "true"):
        path = tmp_path / f"{parallelism}.json"
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": parallelism, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", code, str(path)]
        subprocess.run(command, input=json.dumps(TEXTS), text=True, check=True, env=environment, timeout=60)
        assert path.read_bytes() == trained.read_bytes()


def test_little_text_gives_fewer_entries_than_asked(tmp_path: Path) -> None:
    train_bpe(["ab"], 5000, tmp_path / "t.json")
    assert load_tokenizer(tmp_path / "t.json", 5000).tokenizer.get_vocab_size() == 258


def test_vocabulary_without_room_for_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"vocab_size=256 is too small for the 256 bytes.*needs 257"):
        train_bpe(TEXTS, 256, tmp_path / "t.json")


def test_tokenizer_beyond_the_model_names_both_sizes(trained: Path) -> None:
    with pytest.raises(DataError, match=r"ids up to 319 .*ends at 318; set model\.config\.vocab_size=320"):
        load_tokenizer(trained, 319)


def test_folder_declares_its_end_token(trained: Path) -> None:
    config = trained.with_name("tokenizer_config.json")
    expected = Tokenizer.from_file(str(trained)).token_to_id("def")
    assert expected is not None
    for declared in ("def", {"content": "def", "lstrip": False}):
        config.write_text(json.dumps({"eos_token": declared}))
        assert load_tokenizer(trained.parent, 320).end_id == expected
    config.write_text(json.dumps({"eos_token": "<none>"}))
    with pytest.raises(DataError, match=r"no token that ends a document .*<none>"):
        load_tokenizer(trained.parent, 320)
    config.write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json is not JSON"):
        load_tokenizer(trained.parent, 320)


def test_cut_and_padding_of_another_task_do_not_reach_the_corpus(trained: Path) -> None:
    tokenizer = Tokenizer.from_file(str(trained))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=7)
    tokenizer.save(str(trained))
    (ids,) = load_tokenizer(trained, 320).encode([TEXTS[0]])
    np.testing.assert_array_equal(ids, Tokenizer.from_str(_plain(trained)).encode(TEXTS[0]).ids)


def test_what_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tokenizer\.json cannot be read: No such file"):
        load_tokenizer(tmp_path, 300)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json is not a tokenizer\.json of Hugging Face"):
        load_tokenizer(tmp_path, 300)
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match="no token that ends a document"):
        load_tokenizer(tmp_path, 300)


def _plain(path: Path) -> str:
    return json.dumps({**json.loads(path.read_text()), "truncation": None, "padding": None})
