"""Every configuration that ships starts as it stands, on the ranks of its own cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nxtrain.common.family import find_family
from nxtrain.config.check import resolve_config
from nxtrain.config.load import load
from tests.support.launch_cases import local_command
from tests.support.published import CONFIGS, world_of
from tests.unit.plan.test_command import answer

SHIPPED = sorted(CONFIGS.rglob("*.toml"))
BASES = {"dpo_tiny_cpu": "tiny", "lora_tiny_cpu": "tiny", "llama3_1_8b_lora_cuda": "llama3.1-8b"}
"""Models whose weights a configuration takes."""


def base_of(path: Path, folder: Path) -> tuple[str, ...]:
    """Overrides that name a Hugging Face folder of the model, without weights, if the run begins from weights."""
    if path.stem not in BASES:
        return ()
    family = find_family("llama")
    shape = family.to_hf(family.preset(BASES[path.stem]), "bfloat16")
    (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    return (f"model.hf={folder}",)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_configuration_fits_its_cluster(path: Path, tmp_path: Path) -> None:
    loaded = load(path, base_of(path, tmp_path))
    resolve_config(loaded, world_of(loaded))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_configuration_can_be_launched_on_the_nodes_it_names(path: Path, tmp_path: Path) -> None:
    base = base_of(path, tmp_path)
    loaded = load(path, base)
    command = local_command(path, base, None, {"OMP_NUM_THREADS": "1"}, first_node="node0")
    nodes = loaded.config.cluster.nodes
    per_node = world_of(loaded) // nodes
    argv = " ".join(command.argv)
    assert (f"--nnodes={nodes} " in argv) is (nodes > 1)
    assert (f"--nproc-per-node={per_node} " in argv) is (per_node > 1)


def test_a_shipped_configuration_writes_to_a_folder_of_its_own() -> None:
    folders = [load(path).config.run.dir for path in SHIPPED if path.stem != "base"]
    assert len(folders) == len(set(folders)) > 0


@pytest.mark.parametrize(("method", "gib"), [("lora", 24), ("qlora", 16)])
def test_adapters_of_8b_fit_the_gpu_that_the_recipe_names(method: str, gib: int, tmp_path: Path) -> None:
    path = CONFIGS / "llama3_1_8b_lora_cuda.toml"
    alone = ("--instance", "p5", "--nodes", "1", "parallel.dp=1", f"finetune.method={method}")
    result = answer(str(path), *base_of(path, tmp_path), *alone)
    assert result["trained_params"] == 41_943_040
    assert gib / 2 < result["bytes"]["total"] / 2**30 < 0.9 * gib
