"""The wheel, installed in an environment of its own, holds every package and trains."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.support import ROOT

SOURCES = ("nxtrain", "models", "pyproject.toml", "README.md", "LICENSE")


def run(*argv: object, cwd: Path) -> str:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*map(str, argv)], cwd=cwd, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the tree, built as an installer builds it."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / "tree" / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / "tree" / name)
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder, folder / "tree", cwd=folder)
    (result,) = folder.glob("nxtrain-*.whl")
    return result


def test_it_holds_every_file_of_the_packages_and_the_license(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    renamed = {"nxtrain": "nxtrain", "models": "nxtrain_models"}
    wanted = {
        str(Path(package, path.relative_to(ROOT / room)))
        for room, package in renamed.items()
        for path in (ROOT / room).rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".md")
    }
    assert wanted == {name for name in names if ".dist-info/" not in name}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"nxtrain", "nxtrain_models"}


def test_it_trains_where_nothing_else_of_the_tree_is(wheel: Path, tmp_path: Path) -> None:
    """The dependencies are those of this environment, which a path file lends; it holds no nxtrain by itself."""
    clean = tmp_path / "clean"
    run(sys.executable, "-m", "venv", "--without-pip", clean, cwd=tmp_path)
    packages = clean / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    (packages / "lent.pth").write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    install = ("-m", "pip", "--python", clean / "bin" / "python", "install", "--quiet", "--no-deps")
    run(sys.executable, *install, "--target", packages, wheel, cwd=tmp_path)
    where = run(clean / "bin" / "python", "-c", "import nxtrain, nxtrain_models; print(nxtrain.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(clean)
    config = shutil.copy(ROOT / "configs" / "tiny_cpu.toml", tmp_path)
    run(clean / "bin" / "python", "-m", "nxtrain", "train", config, "run.dir=run", "train.steps=6", cwd=tmp_path)
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert last["step"] == 6
