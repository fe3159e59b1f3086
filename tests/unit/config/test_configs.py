"""Every configuration that ships is one that can run."""

from __future__ import annotations

from pathlib import Path

import pytest

from nxtrain.config.check import resolve
from nxtrain.config.load import load

CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.toml")), ids=lambda path: path.stem)
def test_a_shipped_configuration_loads_and_fits(path: Path) -> None:
    loaded = load(path)
    parallel = loaded.config.parallel
    resolve(loaded, world=parallel.tp * parallel.pp * max(parallel.dp, 1))


def test_a_shipped_configuration_writes_to_a_folder_of_its_own() -> None:
    folders = [load(path).config.run.dir for path in CONFIGS.rglob("*.toml") if path.stem != "base"]
    assert len(folders) == len(set(folders)) > 0
