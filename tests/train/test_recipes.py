"""The published recipes train from the command line, as they stand but for size, ranks, data and device."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from nxtrain.config.check import resolve_config
from nxtrain.config.load import load, values
from nxtrain.optim.schedule import Schedule
from tests.support import commands, forked_python
from tests.support.command_ranks import train_as_launched
from tests.support.corpora import documents, write_corpus, write_tokenizer
from tests.support.published import CONFIGS, world_of

SEQ_LEN, VOCABULARY, STEPS = 32, 300, 4
SCALED: dict[str, Any] = {
    "model.config.vocab_size": VOCABULARY,
    "model.config.hidden_size": 64,
    "model.config.intermediate_size": 96,
    "model.config.num_hidden_layers": 2,
    "model.config.num_attention_heads": 8,
    "model.config.num_key_value_heads": 2,
    "train.seq_len": SEQ_LEN,
    "train.steps": STEPS,
    "checkpoint.every": 2,
    "backend.name": "cpu",
    "backend.layers": "native",
    "cluster.nodes": 1,
}
DEGREES: dict[str, dict[str, Any]] = {
    "llama2_7b_trn1": {"parallel.tp": 2, "parallel.pp": 1, "parallel.dp": 2, "train.global_batch": 4},
    "llama2_70b_trn1": {"parallel.tp": 2, "parallel.pp": 2, "parallel.dp": 2, "train.global_batch": 8},
}


PLACE = {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "32"}
"""First rank of a node, as torchrun starts it."""


def as_typed() -> None:
    """Take nothing of the environment of these tests but the place of a rank."""
    kept = {name: os.environ[name] for name in (*PLACE, "WORLD_SIZE") if name in os.environ}
    os.environ.clear()
    os.environ.update({"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", **kept})
    os.chdir(CONFIGS.parent)
    forked_python.command()


def nxtrain(folder: Path, *argv: object, environ: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit code and output of a command, as a user types it."""
    return commands.command(folder, *argv, environ=environ, first=as_typed, within_s=250.0)


def changes(name: str, folder: Path) -> dict[str, Any]:
    """Keys in which a run here differs from the recipe."""
    data = {"data.path": str(folder / "corpus.arrow"), "data.tokenizer": str(folder / "tokenizer")}
    return {**SCALED, **DEGREES[name], **data, "run.dir": str(folder / "run")}


def overrides(changed: dict[str, Any]) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in changed.items()]


@pytest.mark.parametrize("name", DEGREES)
def test_a_recipe_trains_on_cpu_and_goes_on_from_its_checkpoint(name: str, tmp_path: Path) -> None:
    """From a folder of files, as `nxtrain launch` renders it; the smaller recipe goes on by the command itself."""
    path, changed = CONFIGS / f"{name}.toml", changes(name, tmp_path)
    sources = write_corpus(tmp_path / "src", "text", documents(60))
    code, said = nxtrain(tmp_path, "data", "prepare", sources, "--out", changed["data.path"])
    assert code == 0, said
    write_tokenizer(tmp_path / "tokenizer", VOCABULARY)
    train_as_launched(commands.context(), tmp_path, path, overrides({**changed, "train.steps": STEPS // 2}))
    if name == "llama2_7b_trn1":
        code, said = nxtrain(tmp_path, "launch", path, *overrides(changed))
        assert code == 0, said
    else:
        said = train_as_launched(commands.context(), tmp_path, path, overrides(changed))
    assert f"continues after step {STEPS // 2}" in said

    run = tmp_path / "run"
    recipe = load(path)
    ours = values(load(run / "config.toml").config)
    theirs = values(recipe.config)
    assert {key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)} <= changed.keys()

    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    schedule = Schedule.of(resolve_config(recipe, world_of(recipe)).config)
    assert [record["lr"] for record in records] == pytest.approx([schedule.at(step) for step in range(1, 5)])
    for record in records:
        assert record["loss"] == pytest.approx(math.log(VOCABULARY), rel=0.02)
        assert 0 < record["grad_norm"] < 10
        assert record["tokens"] == record["step"] * changed["train.global_batch"] * SEQ_LEN
    kept = sorted(entry.name for entry in (run / "checkpoints").iterdir() if entry.is_dir())
    assert [name for name in kept if name.startswith("step-")] == ["step-00000002", "step-00000004"]


@pytest.mark.parametrize("name", DEGREES)
def test_a_recipe_without_its_data_ends_with_the_command_that_makes_it(name: str, tmp_path: Path) -> None:
    changed = {**changes(name, tmp_path), **{f"parallel.{axis}": 1 for axis in ("tp", "pp", "dp")}}
    changed["parallel.sequence_parallel"] = False
    code, said = nxtrain(tmp_path, "train", CONFIGS / f"{name}.toml", *overrides(changed))
    assert code == 3, said
    assert f"data.path: {tmp_path}/corpus.arrow does not exist" in said.replace("\n", "")
    assert f"nxtrain data prepare FILES --out {tmp_path}/corpus.arrow" in said.replace("\n", " ")
    assert "Traceback" not in said


@pytest.mark.parametrize("name", DEGREES)
def test_a_recipe_as_it_stands_lacks_only_its_machine(name: str, tmp_path: Path) -> None:
    path = CONFIGS / f"{name}.toml"
    loaded = load(path)
    world, nodes = world_of(loaded), loaded.config.cluster.nodes
    with mock.patch.dict(os.environ, {"PATH": "/usr/bin:/bin"}, clear=True):
        code, _, errors = commands.in_process("config", "show", path)
        assert (code, errors) == (0, "")
        code, shown, errors = commands.in_process("launch", path, "--dry-run")
        assert (code, errors) == (0, "")
        assert f"--nnodes={nodes} " in shown
        assert "--nproc-per-node=32 " in shown
        code, _, errors = commands.in_process("launch", path)
        assert code == 2
        assert f"nodes={nodes}, but this is one machine" in errors.replace("\n", " ")
    # A rank of the whole cluster, as torchrun starts it; and what compiles for it.
    environ = {**PLACE, "WORLD_SIZE": str(world)}
    rank = nxtrain(tmp_path, "train", path, f"run.dir={tmp_path}/run", environ=environ)
    tool = nxtrain(tmp_path, "compile", path, "--first-node", "node0", f"run.dir={tmp_path}/run")
    for (code, said), missing in (
        (rank, "backend.layers=nxd cannot run here"),
        (tool, "torch-neuronx is not installed"),
    ):
        assert code == 5, said
        assert missing in said.replace("\n", " ")
        assert "pip install" in said
        assert "Traceback" not in said
    assert not (tmp_path / "run" / "checkpoints").exists()
