"""Every configuration that ships starts as it stands, on the ranks of its own cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from nxtrain.config.check import resolve_config
from nxtrain.config.load import load
from nxtrain.launch.local import render
from tests.support.shipped import CONFIGS, world_of

SHIPPED = sorted(CONFIGS.rglob("*.toml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_configuration_fits_its_cluster(path: Path) -> None:
    loaded = load(path)
    resolve_config(loaded, world_of(loaded))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_configuration_can_be_launched_on_the_nodes_it_names(path: Path) -> None:
    loaded = load(path)
    command = render(path, (), None, {"OMP_NUM_THREADS": "1"}, first_node="node0")
    nodes = loaded.config.cluster.nodes
    per_node = world_of(loaded) // nodes
    argv = " ".join(command.argv)
    assert (f"--nnodes={nodes} " in argv) is (nodes > 1)
    assert (f"--nproc-per-node={per_node} " in argv) is (per_node > 1)


def test_a_shipped_configuration_writes_to_a_folder_of_its_own() -> None:
    folders = [load(path).config.run.dir for path in SHIPPED if path.stem != "base"]
    assert len(folders) == len(set(folders)) > 0
