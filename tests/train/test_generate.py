"""`nxtrain generate` continues a text from a checkpoint and from a Hugging Face folder alike, piece by piece."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from nxtrain.checkpoint import directory
from nxtrain.convert.hf import hf_to_nxtrain
from nxtrain.data.tokenization import train_bpe
from nxtrain.errors import CheckpointError, ConfigError
from nxtrain.train.generate import Request, Sampling, generate
from tests.support.commands import in_process
from tests.support.models import hf_model, plan

LENGTH = 64
GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of a model that nothing trained, with a tokenizer of its size."""
    folder = tmp_path_factory.mktemp("hf")
    resolved = plan("gqa2", model={"config": {"vocab_size": 300}})
    hf_model(resolved, std=0.3).save_pretrained(folder)
    train_bpe(
        ["na\xefve caf\xe9 \u4f60\u597d, \u4e16\u754c \U0001f642 the quick brown fox " * 50],
        300,
        folder / directory.TOKENIZER,
    )
    return folder


@pytest.fixture
def checkpoint(hf: Path, tmp_path: Path) -> Path:
    hf_to_nxtrain(hf, tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def whole(place: Path, prompt: str, count: int, sampling: Sampling = GREEDY) -> str:
    _, (text,) = generate(str(place), Request((prompt,), count), sampling)
    return text.prompt + text.text


def test_greedy_tokens_are_those_of_transformers(hf: Path, checkpoint: Path) -> None:
    from transformers import AutoModelForCausalLM

    tokenizer = Tokenizer.from_file(str(hf / directory.TOKENIZER))
    ids = tokenizer.encode("the quick").ids
    model = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32)
    # An end that never comes, so that both go on to the end.
    theirs = model.generate(torch.tensor([ids]), max_new_tokens=40, do_sample=False, eos_token_id=None)[0].tolist()
    expected = tokenizer.decode(theirs[: theirs.index(0)] if 0 in theirs else theirs)
    assert whole(hf, "the quick", 40) == whole(checkpoint, "the quick", 40) == expected


def test_pieces_come_one_token_at_a_time(hf: Path) -> None:
    pieces = list[str]()
    generate(str(hf), Request(("the quick",), 30, seed=3), Sampling(1.0), lambda number, piece: pieces.append(piece))
    assert pieces[0] == "the quick"
    assert len(pieces) > 20
    code, out, err = in_process(
        "generate", hf, "--prompt", "the quick", "--max-new-tokens", 30, "--temperature", 1, "--seed", 3
    )
    assert (code, out, err) == (0, "".join(pieces) + "\n", "")


def test_text_ends_before_a_stop_text(hf: Path) -> None:
    text = whole(hf, "the quick", 30)
    stop = text[15:18]
    added = text[len("the quick") :]
    code, out, _ = in_process(
        "generate",
        hf,
        "--prompt",
        "the quick",
        "--temperature",
        0,
        "--stop",
        stop,
        "--stop",
        "never",
        "--max-new-tokens",
        30,
    )
    assert (code, out) == (0, "the quick" + added[: added.index(stop)] + "\n")


def test_text_ends_at_the_length_of_the_model(hf: Path) -> None:
    num_prompt = len(Tokenizer.from_file(str(hf / directory.TOKENIZER)).encode("the").ids)
    with mock.patch.object(Sampling, "draw", return_value=5) as drawn:
        code, _, err = in_process("generate", hf, "--prompt", "the", "--max-new-tokens", 10**12)
        assert (code, err) == (0, f"stopped at the model's length: max_position_embeddings={LENGTH} tokens\n")
        assert drawn.call_count == LENGTH - num_prompt
        assert in_process("generate", hf, "--prompt", "the", "--max-new-tokens", LENGTH - num_prompt)[2] == ""


def test_a_prompt_beyond_the_length_of_the_model_is_refused(hf: Path) -> None:
    tokenizer = Tokenizer.from_file(str(hf / directory.TOKENIZER))
    prompt = "\u4f60" * LENGTH
    code, _, err = in_process("generate", hf, "--prompt", prompt)
    assert code == ConfigError.exit_code
    excess = len(tokenizer.encode(prompt).ids) - LENGTH + 1
    assert f"max_position_embeddings={LENGTH} with what is added; shorten the prompt by {excess} tokens" in err


def test_ends_that_the_folder_declares_are_heeded(hf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    shutil.copytree(hf, folder)
    tokenizer = Tokenizer.from_file(str(hf / directory.TOKENIZER))
    text = whole(hf, "the quick", 12)
    second = tokenizer.encode(text).ids
    for declared in (second[6], [299, second[6]]):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": declared}))
        assert len(whole(folder, "the quick", 12)) < len(text)


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--prompt", ""), 2, "--prompt is empty"),
        (("--prompt", "x", "--stop", ""), 2, "--stop is empty"),
        (("--prompt", "a\udcff"), 2, "take UTF-8 text, and 'a\\udcff' is none at character 1"),
        (("--prompt", "x", "--temperature", "nan"), 2, ""),
        (("--prompt", "x", "--top-p", "0"), 2, "--top-p"),
        (("--prompt", "x", "--seed", "9" * 24), 2, "--seed"),
        (("--prompt", "x", "--max-new-tokens", "4", "--temperature", "1e-300"), 0, ""),
        (("--prompt", "x", "--max-new-tokens", "4", "--seed", -3, "--top-k", 2**62), 0, ""),
    ],
)
def test_options_that_mean_nothing_are_refused(hf: Path, options: tuple[str, ...], code: int, words: str) -> None:
    found, _, err = in_process("generate", hf, *options)
    assert (found, words in err) == (code, True), err


@pytest.mark.parametrize("content", [b"", b"{}", b'"x"', b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_tokenizer_is_named(checkpoint: Path, tmp_path: Path, content: bytes) -> None:
    (checkpoint / directory.TOKENIZER).write_bytes(content)
    for argv in (("generate", checkpoint, "--prompt", "x"), ("convert", "nxtrain-to-hf", checkpoint, tmp_path / "out")):
        code, _, err = in_process(*argv)
        assert (code, f"{checkpoint}/tokenizer.json" in err) == (CheckpointError.exit_code, True), err


def test_weights_that_are_not_finite_are_refused(hf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    shutil.copytree(hf, folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"].fill_(float("nan"))
    save_file(tensors, file, {"format": "pt"})
    code, _, err = in_process("generate", folder, "--prompt", "x")
    assert (code, "model.norm.weight" in err) == (CheckpointError.exit_code, True), err


def test_folders_that_are_no_model_are_refused(hf: Path, tmp_path: Path) -> None:
    code, _, err = in_process("generate", tmp_path, "--prompt", "x")
    assert (code, "holds no complete checkpoint" in err) == (CheckpointError.exit_code, True)
    code, _, err = in_process("generate", f"{tmp_path}/{'x' * 5000}", "--prompt", "x")
    assert (code, "File name too long; check the path" in err) == (CheckpointError.exit_code, True)
    folder = tmp_path / "hf"
    shutil.copytree(hf, folder)
    (folder / directory.TOKENIZER).unlink()
    code, _, err = in_process("generate", folder, "--prompt", "x")
    assert (code, "carries no tokenizer.json" in err) == (ConfigError.exit_code, True)
    for content in ("[]", "{", '{"model_type": 3}', "[" * 100_000):
        (folder / "config.json").write_text(content)
        shutil.copy(hf / directory.TOKENIZER, folder)
        assert in_process("generate", folder, "--prompt", "x")[0] == ConfigError.exit_code


@pytest.mark.parametrize("places", [{"model.norm.weight": 7}, [1], {"model.norm.weight": None}, "x"])
def test_an_index_that_names_no_files_is_refused(hf: Path, tmp_path: Path, places: object) -> None:
    folder = tmp_path / "hf"
    shutil.copytree(hf, folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    code, _, err = in_process("convert", "hf-to-nxtrain", folder, tmp_path / "out")
    assert (code, "weight_map" in err) == (ConfigError.exit_code, True), err


def test_a_conversion_onto_a_file_is_refused(checkpoint: Path, hf: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for argv in (("nxtrain-to-hf", checkpoint, file), ("hf-to-nxtrain", hf, file)):
        code, _, err = in_process("convert", *argv)
        assert (code, f"{file} is a file" in err) == (ConfigError.exit_code, True), err
    assert file.read_text() == "mine"


def test_transformers_shows_no_progress_of_its_own(checkpoint: Path, tmp_path: Path) -> None:
    code, out, err = in_process("convert", "nxtrain-to-hf", checkpoint, tmp_path / "out", "--verify")
    assert (code, err) == (0, "")
    assert out.startswith(f"transformers loads {tmp_path}/out; its scores differ from ours by at most ")
