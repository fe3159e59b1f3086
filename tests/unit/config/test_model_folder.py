"""`model.hf` of the Hub: one commit for the life of a run, and no file before somebody needs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nxtrain.common.errors import ConfigError, StorageError
from nxtrain.common.run_folder import CONFIG_FILE
from nxtrain.config.check import Resolved, resolve_config
from nxtrain.config.load import load
from nxtrain.config.model_folder import whole_folder
from nxtrain.config.show import dump
from nxtrain.launch.targets.job import LaunchOptions, resolve_job
from tests.support.hub import Hub, hub, unwaiting
from tests.support.launch_cases import local_command

__all__ = ["hub", "unwaiting"]

SHAPE = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 128}
INDEX = {
    "weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors", "c": "model-1-of-2.safetensors"}
}


def shape(**changes: int) -> bytes:
    return json.dumps({**SHAPE, "num_hidden_layers": 2, **changes}).encode()


def files(**changes: int) -> dict[str, bytes]:
    """A model with sharded weights, next to what nobody needs."""
    return {
        ".gitattributes": b"*",
        "README.md": b"words",
        "config.json": shape(**changes),
        "model-1-of-2.safetensors": b"1" * 2000,
        "model-2-of-2.safetensors": b"2" * 2000,
        "model.safetensors.index.json": json.dumps(INDEX).encode(),
        "original/consolidated.00.pth": b"0" * 4000,
        "pytorch_model.bin": b"0" * 4000,
        "tokenizer.json": b"{}",
        "tokenizer_config.json": b"{ }",
    }


NEEDED = ["config.json", "model-1-of-2.safetensors", "model-2-of-2.safetensors", "model.safetensors.index.json"]
NEEDED += ["tokenizer.json", "tokenizer_config.json"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with an empty configuration whose run has not begun."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").touch()
    return tmp_path


def resolved(*overrides: str) -> Resolved:
    return resolve_config(load("run.toml", overrides), None)


def record(plan: Resolved) -> None:
    """Record a configuration as the start of its run does."""
    plan.config.run.dir.mkdir(parents=True)
    (plan.config.run.dir / CONFIG_FILE).write_text(dump(plan.config))


def test_the_shape_needs_one_file_and_the_configuration_names_the_commit(folder: Path, hub: Hub) -> None:
    sha = hub.add("acme/tiny", files(num_hidden_layers=3))
    plan = resolved("model.hf=acme/tiny")
    assert plan.config.model.hf == f"acme/tiny@{sha}"
    assert (plan.model.num_hidden_layers, plan.family.name) == (3, "llama")
    assert hub.fetched() == ["config.json"]
    (folder / "pinned.toml").write_text(dump(plan.config))
    asked = len(hub.requests)
    assert resolve_config(load("pinned.toml"), None).model == plan.model
    assert len(hub.requests) == asked


def test_a_folder_of_the_name_wins(folder: Path, hub: Hub) -> None:
    hub.add("acme/tiny", files(num_hidden_layers=3))
    (folder / "acme/tiny").mkdir(parents=True)
    (folder / "acme/tiny/config.json").write_bytes(shape(num_hidden_layers=1))
    plan = resolved("model.hf=acme/tiny")
    assert (plan.config.model.hf, plan.model.num_hidden_layers) == ("acme/tiny", 1)
    assert not hub.requests
    assert resolved("model.hf=hf://acme/tiny").model.num_hidden_layers == 3


def test_a_run_keeps_its_commit(folder: Path, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    first = hub.add("acme/tiny", files(num_hidden_layers=1))
    record(resolved("model.hf=acme/tiny"))
    second = hub.add("acme/tiny", files(num_hidden_layers=2))
    assert capsys.readouterr().err.count("fetches config.json") == 1
    asked = len(hub.requests)
    kept = resolved("model.hf=acme/tiny")
    assert (kept.config.model.hf, kept.model.num_hidden_layers) == (f"acme/tiny@{first}", 1)
    assert (len(hub.requests), capsys.readouterr().err) == (asked, "")
    named = resolved("model.hf=acme/tiny@main")
    assert named.config.model.hf == f"acme/tiny@{first}"
    said = capsys.readouterr().err
    assert f"continues with the commit in runs/nxtrain/config.toml, {first}" in said
    for overrides in (
        (f"model.hf=acme/tiny@{second}",),
        ("model.hf=acme/tiny", "checkpoint.resume=never"),
        ("model.hf=acme/tiny", "run.name=other"),
    ):
        assert resolved(*overrides).config.model.hf == f"acme/tiny@{second}"


def test_what_is_launched_names_the_commit(folder: Path, hub: Hub) -> None:
    sha = hub.add("acme/tiny", files())
    given = ("model.hf=acme/tiny", "train.global_batch=8", "backend.name=cpu")
    pinned = f"model.hf=acme/tiny@{sha}"
    assert local_command(folder / "run.toml", given, 2, {}).argv[-1] == pinned
    job = resolve_job(folder / "run.toml", (*given, "cluster.instance=m5.xlarge"), LaunchOptions(nproc=2))
    assert job.overrides[-1] == pinned
    here = ("model.config.num_hidden_layers=2", "backend.name=cpu")
    assert local_command(folder / "run.toml", here, 2, {}).argv[-2:] == here


def test_a_record_of_another_repository_does_not_count(folder: Path, hub: Hub) -> None:
    hub.add("acme/tiny", files(num_hidden_layers=1))
    record(resolved("model.hf=acme/tiny"))
    sha = hub.add("acme/other", files(num_hidden_layers=2))
    assert resolved("model.hf=acme/other").config.model.hf == f"acme/other@{sha}"
    (folder / "runs/nxtrain" / CONFIG_FILE).write_text("broken")
    assert resolved("model.hf=acme/other").config.model.hf == f"acme/other@{sha}"


def test_weights_come_without_what_nobody_needs_and_once(folder: Path, hub: Hub) -> None:
    sha = hub.add("acme/tiny", files())
    resolved("model.hf=acme/tiny", "model.init=hf")
    assert hub.fetched() == ["config.json"]
    fetched = whole_folder(f"acme/tiny@{sha}")
    assert sorted(hub.fetched()) == NEEDED
    assert sorted(path.name for path in fetched.iterdir()) == NEEDED
    asked = len(hub.requests)
    assert whole_folder(f"acme/tiny@{sha}") == fetched
    assert len(hub.requests) == asked
    (fetched / "model-2-of-2.safetensors").unlink()
    assert (whole_folder(f"acme/tiny@{sha}") / "model-2-of-2.safetensors").read_bytes() == b"2" * 2000


def test_one_file_of_weights_is_enough(folder: Path, hub: Hub) -> None:
    hub.add("acme/tiny", {"config.json": shape(), "model.safetensors": b"1" * 2000, "consolidated.safetensors": b"2"})
    fetched = whole_folder("acme/tiny")
    assert sorted(path.name for path in fetched.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("lacking", "words"),
    [
        (("model-2-of-2.safetensors",), ("has no model-2-of-2.safetensors, but", "and no model-2-of-2")),
        (
            ("model.safetensors.index.json",),
            ("pickled weights, such as original/consolidated.00.pth", "as safetensors"),
        ),
        (("config.json",), ("has no config.json, but .gitattributes, README.md,", "in the format of transformers")),
    ],
)
def test_a_repository_that_is_no_model_is_refused_before_it_comes(
    folder: Path, hub: Hub, lacking: tuple[str, ...], words: tuple[str, ...]
) -> None:
    hub.add("acme/tiny", {name: content for name, content in files().items() if name not in lacking})
    with pytest.raises(ConfigError) as caught:
        whole_folder("acme/tiny")
    assert any(word in str(caught.value) for word in words)
    assert not {"model-1-of-2.safetensors", "pytorch_model.bin"} & {*hub.fetched()}


def test_a_name_that_is_nothing_is_one_problem_of_the_key(folder: Path, hub: Hub, unwaiting: None) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved("model.hf=acme/tinny", "train.global_batch=3", "train.micro_batch=2")
    batch, name = caught.value.problems
    assert batch.key == "train.global_batch"
    assert (name.key, name.origin) == ("model.hf", "override")
    assert name.reason == "no folder acme/tinny is here, and the Hub has no model acme/tinny, or it is private"
    hub.status = 503
    with pytest.raises(StorageError, match="no folder acme/tinny is here, and the Hub does not send acme/tinny"):
        resolved("model.hf=acme/tinny")


def test_without_network_a_half_fetched_model_names_what_it_lacks(
    folder: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    hub.add("acme/tiny", files())
    plan = resolved("model.hf=acme/tiny")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolved("model.hf=acme/tiny").model == plan.model
    with pytest.raises(ConfigError, match=r"lacks model\.safetensors, and HF_HUB_OFFLINE is set"):
        whole_folder(plan.config.model.hf)
