"""A model of the Hub trains, goes on, generates and converts as its folder does, by one commit."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest

from nxtrain.checkpoint import directory
from nxtrain.checkpoint.meta import read_meta
from nxtrain.common.run_folder import CHECKPOINTS_DIR, CONFIG_FILE
from nxtrain.config.load import load
from tests.support import command_ranks, commands
from tests.support.hub import Hub, hub
from tests.support.launch_cases import local_command
from tests.support.models import hf_model, plan, text_model
from tests.support.runs import FILE, course

__all__ = ["hub"]

VOCAB = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_model(tmp_path_factory.mktemp("hub") / "model")


@pytest.fixture
def folder(tmp_path: Path, model: Path, hub: Hub) -> Iterator[Path]:
    """A folder with text, the configuration of a run of two ranks, and a model that the Hub has, too."""
    (tmp_path / "text").mkdir()
    for number in range(4):
        (tmp_path / f"text/{number}.txt").write_text("the quick brown fox " * (20 + number))
    command_ranks.write_config(
        tmp_path,
        every=1,
        model={"init": "hf", "preset": "", "config": {}},
        data={"source": "text", "path": str(tmp_path / "text"), "shuffle": True},
        train={"steps": 2, "seq_len": 32, "global_batch": 4},
        optim={"decay_steps": 4},
    )
    yield tmp_path


def turn_to(variables: Mapping[str, str]) -> None:
    """Give a rank the variables of a server; its processes were prepared before."""
    os.environ.update(variables)


def train(folder: Path, hub: Hub, *overrides: str) -> str:
    """Train on two ranks as `nxtrain launch` does; returns the lines of the first rank."""
    config = folder / FILE
    rendered = local_command(config, overrides, None, os.environ)
    given = rendered.argv[rendered.argv.index(str(config)) + 1 :]
    first = partial(turn_to, hub.variables(folder / "of-the-hub"))
    with command_ranks.Ranks(commands.context(), folder, overrides=given, config=config, first=first) as ranks:
        codes, said = ranks.ended(within_s=100.0), ranks.said()
    assert set(codes.values()) == {0}, said
    return said[0]


def test_a_run_on_a_model_of_the_hub_is_that_on_its_folder_and_keeps_its_commit(
    folder: Path, model: Path, hub: Hub
) -> None:
    sha = hub.add_folder("acme/tiny", model)
    said = train(folder, hub, "model.hf=acme/tiny")
    assert f"starts from the weights of model.hf=acme/tiny@{sha}" in said
    assert hub.fetched().count("model.safetensors") == 1
    assert len([path for path in hub.requests if path.startswith("GET /files") and "model.safetensors" in path]) == 1
    recorded = load(folder / "run" / CONFIG_FILE).config.model.hf
    assert recorded == f"acme/tiny@{sha}"

    other = hf_model(plan("gqa2", model={"config": {"vocab_size": VOCAB}}), seed=1)
    other.save_pretrained(folder / "newer")
    newer = hub.add_folder("acme/tiny", folder / "newer")
    assert newer != sha
    said = train(folder, hub, "model.hf=acme/tiny", "train.steps=4")
    assert "continues after step 2" in said
    assert load(folder / "run" / CONFIG_FILE).config.model.hf == recorded

    train(folder, hub, f"model.hf={model}", f"run.dir={folder / 'of-folder'}", "train.steps=4")
    assert course(folder / "run") == course(folder / "of-folder")


def test_ranks_that_got_different_commits_end(folder: Path, model: Path, hub: Hub) -> None:
    first = hub.add_folder("acme/tiny", model)
    second = hub.add("acme/tiny", {**hub.repositories["models/acme/tiny"].commits[first], "more": b""})
    hub.moves = [first, second]
    given, config = ("model.hf=acme/tiny",), folder / FILE
    first_of_all = partial(turn_to, hub.variables(folder / "of-the-hub"))
    with command_ranks.Ranks(commands.context(), folder, overrides=given, config=config, first=first_of_all) as ranks:
        codes, said = ranks.ended(within_s=100.0), ranks.said()
    assert set(codes.values()) == {2}, said
    assert "ranks read different models, acme/tiny@" in " ".join(said[0].split())


def test_adapters_name_the_commit_below_them_and_are_merged_with_it(folder: Path, model: Path, hub: Hub) -> None:
    sha = hub.add_folder("acme/tiny", model)
    train(folder, hub, "model.hf=acme/tiny", "finetune.method=lora", "finetune.r=2")
    written = json.loads((folder / "run/adapter/adapter_config.json").read_text())
    assert (written["base_model_name_or_path"], written["revision"]) == ("acme/tiny", sha)
    checkpoint = directory.step_path(folder / "run" / CHECKPOINTS_DIR, 2)
    assert read_meta(checkpoint).base == f"acme/tiny@{sha}"
    variables = hub.variables(folder / "other-cache")  # as on another machine
    for source, command in ((folder / "run", "nxtrain-to-hf"), (folder / "run/adapter", "peft-to-hf")):
        ended = commands.command(folder, "convert", command, source, folder / command, environ=variables)
        assert ended.code == 0, ended.printed
    assert (folder / "nxtrain-to-hf/model.safetensors").read_bytes() == (
        folder / "peft-to-hf/model.safetensors"
    ).read_bytes()


def test_commands_that_take_a_folder_take_a_name_of_the_hub(folder: Path, model: Path, hub: Hub) -> None:
    sha = hub.add_folder("acme/tiny", model)
    variables = hub.variables(folder / "of-the-hub")
    given = ("--prompt", "the quick", "--max-new-tokens", 4, "--json")
    texts = []
    for address in ("acme/tiny", f"hf://acme/tiny@{sha}", model):
        ended = commands.command(folder, "generate", address, *given, environ=variables)
        assert ended.code == 0, ended.printed
        texts.append(ended.printed[ended.printed.index('"texts"') :])
    assert texts == texts[-1:] * 3
    ended = commands.command(
        folder, "convert", "hf-to-nxtrain", "acme/tiny@main", folder / "converted", environ=variables
    )
    assert ended.code == 0, ended.printed
    ended = commands.command(folder, "eval", "acme/tinny", "--tasks", "cloze", environ=variables)
    assert ended.code == 2
    assert "no folder acme/tinny is here, and the Hub has no model acme/tinny" in " ".join(ended.printed.split())
