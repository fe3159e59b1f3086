"""`nxtrain generate` continues a text from a checkpoint and from a Hugging Face folder alike, piece by piece."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from tokenizers import Tokenizer
from typer.testing import CliRunner

from nxtrain.backends.base import Backend, Support
from nxtrain.backends.cpu import CpuBackend
from nxtrain.checkpoint import directory
from nxtrain.checkpoint.convert.hf import hf_to_nxtrain
from nxtrain.cli.main import app
from nxtrain.common import hf_files
from nxtrain.common.errors import CheckpointError, ConfigError
from nxtrain.common.mesh import Mesh
from nxtrain.common.process.placement import Placement
from nxtrain.common.process.progress import Progress
from nxtrain.launch.neuron import reexec_on_cores
from nxtrain.nn.decoding import Decoder
from nxtrain.tools.eval import command
from nxtrain.tools.eval.generate import GenerateRequest, Sampling, generate, generate_on
from nxtrain.tools.eval.model_shape import local_shape
from nxtrain.tools.eval.trained import Trained
from tests.support.commands import errors_of, in_process
from tests.support.models import DRAWN_FAMILIES, LENGTH, continued, text_model
from tests.support.ranks import RankPool

GREEDY = Sampling(temperature=0.0)


@pytest.fixture
def checkpoint(hf: Path, tmp_path: Path) -> Path:
    hf_to_nxtrain(hf, tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def whole(location: Path, prompt: str, count: int, sampling: Sampling = GREEDY) -> str:
    return continued(location, prompt, count, sampling)


def test_greedy_tokens_are_those_of_transformers(hf: Path, checkpoint: Path) -> None:
    from transformers import AutoModelForCausalLM

    tokenizer = Tokenizer.from_file(str(hf / hf_files.TOKENIZER))
    ids = tokenizer.encode("the quick").ids
    model = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32)
    # An end that never comes, so that both go on to the end.
    theirs = model.generate(torch.tensor([ids]), max_new_tokens=40, do_sample=False, eos_token_id=None)[0].tolist()
    expected = tokenizer.decode(theirs[: theirs.index(0)] if 0 in theirs else theirs)
    assert whole(hf, "the quick", 40) == whole(checkpoint, "the quick", 40) == expected


def test_pieces_come_one_token_at_a_time(hf: Path) -> None:
    pieces = list[str]()
    generate(
        str(hf), GenerateRequest(("the quick",), 30, seed=3), Sampling(1.0), lambda number, piece: pieces.append(piece)
    )
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
    num_prompt = len(Tokenizer.from_file(str(hf / hf_files.TOKENIZER)).encode("the").ids)
    with mock.patch.object(Sampling, "draw", return_value=5) as drawn:
        code, _, err = in_process("generate", hf, "--prompt", "the", "--max-new-tokens", 10**12)
        assert (code, err) == (0, f"stopped at the model's length: max_position_embeddings={LENGTH} tokens\n")
        assert drawn.call_count == LENGTH - num_prompt
        assert in_process("generate", hf, "--prompt", "the", "--max-new-tokens", LENGTH - num_prompt)[2] == ""


def test_a_prompt_beyond_the_length_of_the_model_is_refused(hf: Path) -> None:
    tokenizer = Tokenizer.from_file(str(hf / hf_files.TOKENIZER))
    prompt = "\u4f60" * LENGTH
    err = errors_of("generate", hf, "--prompt", prompt, code=ConfigError.exit_code)
    excess = len(tokenizer.encode(prompt).ids) - LENGTH + 1
    assert f"maximum is max_position_embeddings={LENGTH}; shorten the prompt by {excess} tokens" in err


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_ends_that_the_folder_declares_are_heeded(hf: Path, tmp_path: Path, file: str) -> None:
    folder = tmp_path / "hf"
    shutil.copytree(hf, folder)
    tokenizer = Tokenizer.from_file(str(hf / hf_files.TOKENIZER))
    text = whole(hf, "the quick", 12)
    second = tokenizer.encode(text).ids
    for declared in (second[6], [299, second[6]]):
        config = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**config, "eos_token_id": declared}))
        assert len(whole(folder, "the quick", 12)) < len(text)


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--prompt", ""), 2, "--prompt is empty"),
        (("--prompt", "x", "--stop", ""), 2, "--stop is empty"),
        (("--prompt", "a\udcff"), 2, "take UTF-8 text, but 'a\\udcff' is invalid at character 1"),
        (("--prompt", "x", "--temperature", "nan"), 2, ""),
        (("--prompt", "x", "--top-p", "0"), 2, "--top-p"),
        (("--prompt", "x", "--seed", "9" * 24), 2, "--seed"),
        (("--prompt", "x", "--max-new-tokens", "4", "--temperature", "1e-300"), 0, ""),
        (("--prompt", "x", "--max-new-tokens", "4", "--seed", -3, "--top-k", 2**62), 0, ""),
    ],
)
def test_options_that_mean_nothing_are_refused(hf: Path, options: tuple[str, ...], code: int, words: str) -> None:
    result, _, err = in_process("generate", hf, *options)
    assert (result, words in err) == (code, True), err


def run_of(checkpoint: Path, folder: Path) -> Path:
    """Run folder whose newest checkpoint is quarantined, and the one before it incomplete."""
    for step in (2, 4, 6):
        shutil.copytree(checkpoint, directory.step_path(folder / "checkpoints", step))
    (directory.step_path(folder / "checkpoints", 4) / directory.META).unlink()
    directory.quarantine(directory.step_path(folder / "checkpoints", 6))
    return folder


def test_a_checkpoint_that_is_not_the_newest_is_named(checkpoint: Path, tmp_path: Path) -> None:
    run = run_of(checkpoint, tmp_path / "run")
    chosen = directory.step_path(run / "checkpoints", 2)
    warning = (
        "WARNING: step-00000002 is not the newest: step-00000004, step-00000006.corrupt is incomplete or damaged\n"
    )
    request = ("--prompt", "x", "--max-new-tokens", 2, "--temperature", 0)
    code, text, err = in_process("generate", run, *request)
    assert (code, err) == (0, f"from {chosen}, step 0\n{warning}")
    code, out, err = in_process("generate", run, *request, "--json")
    assert (code, err, json.loads(out)["checkpoint"]) == (0, warning, str(chosen))
    assert in_process("generate", chosen, *request) == (0, text, "")
    code, _, err = in_process("convert", "nxtrain-to-hf", run, tmp_path / "out")
    assert (code, err) == (0, warning)
    code, _, err = in_process("eval", run, "--tasks", "copying", "--limit", 2)
    assert (code, warning in err) == (0, True), err


def test_folders_that_are_no_model_are_refused(hf: Path, tmp_path: Path) -> None:
    code, _, err = in_process("generate", tmp_path, "--prompt", "x")
    assert (code, "holds no complete checkpoint" in err) == (CheckpointError.exit_code, True)
    code, _, err = in_process("generate", f"{tmp_path}/{'x' * 5000}", "--prompt", "x")
    assert (code, "File name too long; check the path" in err) == (CheckpointError.exit_code, True)
    folder = tmp_path / "hf"
    shutil.copytree(hf, folder)
    (folder / hf_files.TOKENIZER).unlink()
    code, _, err = in_process("generate", folder, "--prompt", "x")
    assert (code, "has no tokenizer.json" in err) == (ConfigError.exit_code, True)
    for content in ("[]", "{", '{"model_type": 3}', "[" * 100_000):
        (folder / "config.json").write_text(content)
        shutil.copy(hf / hf_files.TOKENIZER, folder)
        assert in_process("generate", folder, "--prompt", "x")[0] == ConfigError.exit_code


@pytest.mark.parametrize("places", [{"model.norm.weight": 7}, [1], {"model.norm.weight": None}, "x"])
def test_an_index_that_names_no_files_is_refused(hf: Path, tmp_path: Path, places: object) -> None:
    folder = tmp_path / "hf"
    shutil.copytree(hf, folder, ignore=shutil.ignore_patterns("*.safetensors"))
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
    wrote, loaded = out.splitlines()
    assert wrote == f"{tmp_path}/out holds the weights of {checkpoint}, in Hugging Face's format"
    assert loaded.startswith(f"transformers loads {tmp_path}/out; its scores differ from ours by at most ")


PROMPTS = ("the quick", "na\xefve", "brown fox " * 3, "\u4f60\u597d, \u4e16\u754c the", "x")


@pytest.mark.parametrize("shape", ["gqa", "tied", "llama3-rope", "yarn-rope", "linear-rope", *DRAWN_FAMILIES])
def test_texts_in_a_batch_are_those_of_single_runs_and_of_no_cache(tmp_path: Path, shape: str) -> None:
    """Token for token, greedy and sampled: a text of any length does not depend on its neighbours."""
    location = text_model(tmp_path, shape)
    model = Trained.find(str(location))
    backend = CpuBackend()
    whole_texts = model.open(backend, LENGTH, Mesh(1, 0))
    for sampling in (GREEDY, Sampling(1.3, top_k=40, top_p=0.95)):
        request = GenerateRequest(PROMPTS, 16, seed=7)
        together = generate_on(backend, model, request, sampling, lambda *_: None)
        assert len({text.ending for text in together} | {len(text.added) for text in together}) > 1
        for prompt, text in zip(PROMPTS, together, strict=True):
            (single,) = generate_on(backend, model, replace(request, prompts=(prompt,)), sampling, lambda *_: None)
            assert (text.added, text.text, text.ending) == (single.added, single.text, single.ending)
            generator = torch.Generator().manual_seed(7)
            for at, token in enumerate(text.added):
                with torch.no_grad():
                    scores = whole_texts.logits(torch.tensor([[*text.ids, *text.added[:at]]]))[0, -1]
                assert sampling.draw(scores, generator) == token


@pytest.mark.parametrize("shape", ["yarn-rope", "linear-rope", "dynamic-rope"])
def test_tokens_beyond_the_original_length_are_those_of_transformers(tmp_path: Path, shape: str) -> None:
    from transformers import AutoModelForCausalLM

    location = text_model(tmp_path, shape)
    theirs = AutoModelForCausalLM.from_pretrained(location, dtype=torch.float32)
    endless = replace(Trained.find(str(location)), ends=frozenset())
    request = GenerateRequest(("the quick brown fox na\xefve",), LENGTH, seed=0)
    (text,) = generate_on(CpuBackend(), endless, request, GREEDY, lambda *_: None)
    ids = torch.tensor([[*text.ids, *text.added]])
    assert (text.ending, ids.shape[1]) == ("length", LENGTH)
    with torch.no_grad():
        likeliest = theirs(ids).logits.argmax(-1)
    assert likeliest[0, len(text.ids) - 1 : -1].tolist() == text.added


def continued_on(backend: Backend, location: Path, sampling: Sampling) -> list[tuple[list[int], str]]:
    """Texts on one rank of a tensor parallel world."""
    texts = generate_on(
        backend, Trained.find(str(location)), GenerateRequest(PROMPTS, 12, seed=2), sampling, lambda *_: None
    )
    return [(text.added, text.text) for text in texts]


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_share_a_model_continue_as_one_does(hf: Path, checkpoint: Path, ranks: RankPool, world: int) -> None:
    """Two key/value heads: each of two ranks holds one, and two of four ranks hold the same."""
    sampling = Sampling(0.9) if world == 2 else GREEDY
    alone = continued_on(CpuBackend(), hf, sampling)
    assert ranks.run(world, continued_on, checkpoint if world == 2 else hf, sampling) == [alone] * world


def test_a_model_that_cannot_be_shared_so_is_refused(hf: Path, ranks: RankPool) -> None:
    with pytest.raises(AssertionError, match="ConfigError"):
        ranks.run(3, continued_on, hf, GREEDY)


def test_scripts_get_json_and_people_all_texts(hf: Path) -> None:
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    argv = ("generate", hf, *prompts, "--temperature", 0, "--max-new-tokens", 9)
    code, out, err = in_process(*argv, "--json")
    result = json.loads(out)
    assert (code, err, result["checkpoint"], result["step"]) == (0, "", str(hf), 0)
    assert [text["prompt"] for text in result["texts"]] == [*PROMPTS]
    assert {text["ending"] for text in result["texts"]} <= {"tokens", "end"}
    assert [text["prompt"] + text["text"] for text in result["texts"]] == [whole(hf, p, 9) for p in PROMPTS]
    code, out, err = in_process(*argv)
    shown = [f"--- {n} of {len(PROMPTS)}\n{whole(hf, p, 9)}\n" for n, p in enumerate(PROMPTS, 1)]
    assert (code, out, err) == (0, "".join(shown), "")


def test_only_the_first_rank_prints(hf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in (0, 1):
        location = Placement(rank=rank, world=2)
        monkeypatch.setattr("nxtrain.cli.inference.start_with_threads", lambda *_, location=location, **__: location)
        for options in ((), ("--json",), ("--prompt", "y")):
            # Not by `main`, which ends the process of a rank at once.
            argv = ["generate", str(hf), "--prompt", "x", "--max-new-tokens", "2", *options]
            result = CliRunner().invoke(app, argv)
            assert (result.exit_code, bool(result.output)) == (0, rank == 0), result.output


@pytest.mark.parametrize(("local_rank", "world", "core"), [(0, 1, "3"), (1, 2, "8"), (3, 4, "10")])
def test_each_rank_is_started_again_with_its_core(
    monkeypatch: pytest.MonkeyPatch, local_rank: int, world: int, core: str
) -> None:
    started: list[dict[str, str]] = []
    monkeypatch.setattr("nxtrain.launch.neuron.support", lambda: Support(True, "a device"))
    monkeypatch.setattr("os.execve", lambda path, argv, environ: started.append(environ))
    reexec_on_cores("3,8-10", {"OTHER": "1"}, local_rank, world)
    assert [(start["NEURON_RT_VISIBLE_CORES"], start["OTHER"]) for start in started] == [(core, "1")]
    reexec_on_cores("3,8-10", started[0], local_rank, world)
    assert len(started) == 1, "the process has its core"
    for wrong in ("a-b", "0-x", "7" if world > 1 else "-"):
        with pytest.raises(ConfigError, match="--visible-cores: "):
            reexec_on_cores(wrong, {}, local_rank, world)


def test_cores_are_given_by_a_flag(hf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setattr("nxtrain.launch.neuron.support", lambda: Support(True, "a device"))
    monkeypatch.setattr("os.execve", lambda path, argv, environ: started.append(environ["NEURON_RT_VISIBLE_CORES"]))
    assert in_process("generate", hf, "--prompt", "x", "--visible-cores", "4", "--max-new-tokens", 1)[0] == 0
    assert started == ["4"]


def test_an_exported_folder_works_in_the_pipeline_of_transformers(hf: Path, checkpoint: Path, tmp_path: Path) -> None:
    """Servers such as vLLM read the same folder."""
    from transformers import pipeline

    out = tmp_path / "out"
    assert in_process("convert", "nxtrain-to-hf", checkpoint, out)[0] == 0
    writer = pipeline("text-generation", model=str(out), tokenizer=str(out), device="cpu")
    (result,) = writer("the quick", max_new_tokens=12, do_sample=False, return_full_text=True)
    assert result["generated_text"].startswith("the quick")
    assert result["generated_text"] == whole(checkpoint, "the quick", 12)


@pytest.mark.parametrize(
    "argv", [("generate", "--prompt", "x", "--max-new-tokens", "2"), ("eval", "--tasks", "copying", "--limit", "2")]
)
@pytest.mark.parametrize("given", ["", "2"])
def test_commands_start_with_the_threads_of_their_work(hf: Path, argv: tuple[str, ...], given: str) -> None:
    """OMP_DISPLAY_ENV is the OpenMP library's own account of what it has read."""
    shell = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    shell |= {"OMP_DISPLAY_ENV": "verbose", **({"OMP_NUM_THREADS": given} if given else {})}
    command = [sys.executable, "-m", "nxtrain", argv[0], str(hf), *argv[1:]]
    done = subprocess.run(command, env=shell, capture_output=True, text=True, check=True)
    assert f"OMP_NUM_THREADS = '{given or 1}'" in done.stderr
    assert ("GOMP_SPINCOUNT = '0'" in done.stderr) is bool(given), "a lone thread never waits"


def test_threads_follow_the_shape_in_a_checkpoint_and_in_a_folder(hf: Path, checkpoint: Path, tmp_path: Path) -> None:
    wanted = Trained.find(str(hf))
    assert local_shape(str(hf)) == local_shape(str(checkpoint)) == (wanted.family, wanted.config)
    assert local_shape(str(tmp_path / "absent")) is None
    assert local_shape("s3://bucket/run") is None
    (tmp_path / "config.json").write_text("[")
    assert local_shape(str(tmp_path)) is None


def slowly(patch: pytest.MonkeyPatch, owner: object, name: str) -> None:
    """Make a function take long enough for lines of progress."""
    really = getattr(owner, name)

    def slow(*args: object, **options: object) -> object:
        time.sleep(0.2)
        return really(*args, **options)

    patch.setattr(owner, name, slow)


@pytest.mark.parametrize("options", [(), ("--json",), ("--prompt", "y")])
def test_what_takes_long_before_the_first_token_is_printed_before_it(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    run = tmp_path / "run"
    location = directory.step_path(run / "checkpoints", 2)
    shutil.copytree(checkpoint, location)
    monkeypatch.setattr("nxtrain.tools.eval.generate.Progress", partial(Progress, line_every_s=0.05))
    slowly(monkeypatch, Trained, "open")
    slowly(monkeypatch, Decoder, "scores")
    argv = ["generate", str(run), "--prompt", "the quick", "--max-new-tokens", "3", "--temperature", "0", *options]
    result = CliRunner().invoke(app, argv)  # whose output has both streams in the order of their lines
    assert result.exit_code == 0, result.output
    wanted = [f"reading the weights of {location}: ", "reading 2 tokens of prompts: ", "the quick"]
    if "--prompt" in options:
        wanted[1:] = ["reading 3 tokens of prompts: ", "continuing the prompts: ", "the quick"]
    elif options:
        wanted[2:] = ["continuing the prompts: ", '"the quick']
    else:
        assert "continuing" not in result.output, "tokens are shown as they come"
    if "--json" not in options:
        wanted.insert(0, f"from {location}, step 0")
    places = [result.output.find(words) for words in wanted]
    assert -1 not in places and places == sorted(places), result.output


def test_an_evaluation_prints_what_it_reads(hf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nxtrain.tools.eval.command.Progress", partial(Progress, line_every_s=0.05))
    slowly(monkeypatch, Trained, "open")
    slowly(monkeypatch, command, "choose_tasks")
    code, _, err = in_process("eval", hf, "--tasks", "copying", "--limit", 2)
    wanted = ["reading the names of tasks: ", f"{hf}: copying\n", f"reading the weights of {hf}: "]
    places = [err.find(words) for words in wanted]
    assert code == 0 and -1 not in places and places == sorted(places), err
