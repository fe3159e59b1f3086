"""Every configuration that ships is one that can run, or waits for nothing but features that it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from nxtrain.config.check import AVAILABLE, resolve
from nxtrain.config.load import Loaded, load
from nxtrain.errors import ConfigError, Problem

CONFIGS = Path(__file__).parents[3] / "configs"
RECIPES = {"llama2_7b_trn1", "llama2_70b_trn1"}

# Which files wait for a feature that this release lacks; a feature that arrives deletes its line, here and there.
WAITING: dict[str, set[str]] = {
    "data.source": RECIPES,
}


def problems(loaded: Loaded) -> tuple[Problem, ...]:
    """What keeps a configuration from running on as many ranks as it asks for."""
    parallel = loaded.config.parallel
    try:
        resolve(loaded, world=parallel.tp * parallel.pp * max(parallel.dp, 1))
    except ConfigError as error:
        return error.problems
    return ()


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.toml")), ids=lambda path: path.stem)
def test_a_shipped_configuration_fits_and_waits_for_the_named_features_only(path: Path) -> None:
    found = problems(load(path))
    assert {problem.key for problem in found} == {key for key, files in WAITING.items() if path.stem in files}
    assert all("not available in this release" in problem.reason for problem in found), found


def test_what_configurations_wait_for_is_what_this_release_lacks() -> None:
    assert WAITING.keys() <= {key for key, _, _ in AVAILABLE}
    assert set.union(*WAITING.values()) <= {path.stem for path in CONFIGS.rglob("*.toml")}


def test_a_shipped_configuration_writes_to_a_folder_of_its_own() -> None:
    folders = [load(path).config.run.dir for path in CONFIGS.rglob("*.toml") if path.stem != "base"]
    assert len(folders) == len(set(folders)) > 0
