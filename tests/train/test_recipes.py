"""The published recipes train from the command line, as they stand but for size, ranks, data and device.

What is changed is listed here, and the run's own record of its configuration is held to the list.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nxtrain.config.check import resolve_config
from nxtrain.config.load import load, values
from nxtrain.optim.schedule import Schedule
from tests.support import commands
from tests.support.command_ranks import train_as_launched
from tests.support.corpora import documents, write_corpus, write_tokenizer
from tests.support.shipped import CONFIGS, world_of

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


def nxtrain(*argv: object, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """The command, as a user starts it, with nothing of this process but its paths."""
    clean = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", **(environ or {})}
    command = [sys.executable, "-m", "nxtrain", *map(str, argv)]
    return subprocess.run(
        command, cwd=CONFIGS.parent, env=clean, capture_output=True, text=True, timeout=250, check=False
    )


def changes(name: str, folder: Path) -> dict[str, Any]:
    """Keys in which a run here differs from the recipe."""
    data = {"data.path": str(folder / "corpus.arrow"), "data.tokenizer": str(folder / "tokenizer")}
    return {**SCALED, **DEGREES[name], **data, "run.dir": str(folder / "run")}


def overrides(changed: dict[str, Any]) -> list[str]:
    """The same as arguments."""
    return [f"{key}={json.dumps(value)}" for key, value in changed.items()]


@pytest.mark.parametrize("name", DEGREES)
def test_a_recipe_trains_on_cpu_and_goes_on_from_its_checkpoint(name: str, tmp_path: Path) -> None:
    """From a folder of files, as `nxtrain launch` renders it; the smaller recipe goes on by the command itself."""
    path, changed = CONFIGS / f"{name}.toml", changes(name, tmp_path)
    sources = write_corpus(tmp_path / "src", "text", documents(60))
    prepared = nxtrain("data", "prepare", sources, "--out", changed["data.path"])
    assert prepared.returncode == 0, prepared.stderr[-3000:]
    write_tokenizer(tmp_path / "tokenizer", VOCABULARY)
    train_as_launched(commands.context(), tmp_path, path, overrides({**changed, "train.steps": STEPS // 2}))
    if name == "llama2_7b_trn1":
        done = nxtrain("launch", path, *overrides(changed))
        assert done.returncode == 0, done.stderr[-3000:]
        said = done.stderr
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
    done = nxtrain("train", CONFIGS / f"{name}.toml", *overrides(changed))
    assert done.returncode == 3, done.stderr[-3000:]
    assert f"data.path: {tmp_path}/corpus.arrow does not exist" in done.stderr.replace("\n", "")
    assert f"nxtrain data prepare FILES --out {tmp_path}/corpus.arrow" in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", DEGREES)
def test_a_recipe_as_it_stands_lacks_only_its_machine(name: str, tmp_path: Path) -> None:
    path = CONFIGS / f"{name}.toml"
    loaded = load(path)
    world, nodes = world_of(loaded), loaded.config.cluster.nodes
    shown = nxtrain("config", "show", path)
    assert (shown.returncode, shown.stderr) == (0, "")
    dry = nxtrain("launch", path, "--dry-run")
    assert (dry.returncode, dry.stderr) == (0, "")
    assert f"--nnodes={nodes} " in dry.stdout
    assert "--nproc-per-node=32 " in dry.stdout
    alone = nxtrain("launch", path)
    assert alone.returncode == 2
    assert f"nodes={nodes}, but this is one machine" in alone.stderr.replace("\n", " ")
    # A rank of the whole cluster, as torchrun starts it; and what compiles for it.
    place = {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "32", "WORLD_SIZE": str(world)}
    rank = nxtrain("train", path, f"run.dir={tmp_path}/run", environ=place)
    tool = nxtrain("compile", path, "--first-node", "node0", f"run.dir={tmp_path}/run")
    for done, missing in ((rank, "backend.layers=nxd cannot run here"), (tool, "torch-neuronx is not installed")):
        assert done.returncode == 5, done.stderr[-3000:]
        assert missing in done.stderr.replace("\n", " ")
        assert "pip install" in done.stderr
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "checkpoints").exists()
