"""`scripts/test.sh nxd`: which source of NeuronX Distributed it takes, and what it says of one that it does not."""

from __future__ import annotations

import re
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.nxd_cpu import COMMITS, REPOSITORY
from tests.support.nxd_golden import VERSION
from tests.support.processes import PATIENCE, patient_s

SCRIPT = (ROOT / "scripts" / "nxd.sh").read_text(encoding="utf-8")
WAY_OUT = f"git clone {REPOSITORY}, check out {COMMITS[VERSION][:7]}, then: bash scripts/test.sh nxd --source DIR"


def bash(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", *words], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def taken(folder: Path) -> subprocess.CompletedProcess[str]:
    return bash(
        "-c", 'set -euo pipefail; source scripts/setup.sh; source scripts/nxd.sh; nxd_source "$1"', "-", str(folder)
    )


def source_tree(folder: Path, version: str = VERSION) -> Path:
    """A checkout as far as the lane looks at it."""
    package = folder / "src" / "neuronx_distributed"
    package.mkdir(parents=True)
    (package / "_version.py").write_text(f'# Copyright\n__version__ = "{version}"\n', encoding="utf-8")
    return folder


def committed(folder: Path) -> str:
    """Make it a repository, and name its commit."""
    git = ["git", "-C", str(folder), "-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message=m"], check=True)
    return subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()


def test_it_knows_the_source_that_the_golden_files_were_recorded_from() -> None:
    constants = dict(re.findall(r"^(NXD_\w+)=(\S+)$", SCRIPT, flags=re.MULTILINE))
    assert constants["NXD_COMMIT"] == COMMITS[VERSION]
    assert (constants["NXD_VERSION"], constants["NXD_REPOSITORY"]) == (VERSION, REPOSITORY)


def test_a_checkout_and_its_src_are_taken(tmp_path: Path) -> None:
    tree = source_tree(tmp_path / "tree")
    for folder in (tree, tree / "src"):
        done = taken(folder)
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{tree / 'src'}\n", "")


def test_an_archive_below_another_repository_is_not_taken_for_that_one(tmp_path: Path) -> None:
    committed(tmp_path)
    assert taken(source_tree(tmp_path / "archive")).returncode == 0


@pytest.mark.parametrize("case", ["empty", "absent", "version", "commit"])
def test_any_other_folder_is_refused_in_one_line_with_the_way_out(case: str, tmp_path: Path) -> None:
    folder = tmp_path / case
    expected = f"error: --source {folder} holds no NeuronX Distributed"
    if case == "empty":
        folder.mkdir()
    elif case == "version":
        source_tree(folder, "0.17.0")
        expected = f"is NeuronX Distributed 0.17.0, and the lane nxd knows {VERSION} at {COMMITS[VERSION][:7]}"
    elif case == "commit":
        source_tree(folder)
        expected = f"is NeuronX Distributed {VERSION} at {committed(folder)[:7]}, and the lane nxd knows"
    done = bash("scripts/test.sh", "nxd", "--source", str(folder))
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert expected in line
    assert line.endswith(WAY_OUT)


def test_a_source_is_for_its_lane_and_its_torch(tmp_path: Path) -> None:
    tree = str(source_tree(tmp_path))
    for words, reason in (
        (["unit", "--source", tree], "--source is for the lane nxd"),
        (["nxd", "--source", tree, "--torch", "2.13.0"], "NeuronX Distributed runs on torch 2.9.0, not 2.13.0"),
    ):
        done = bash("scripts/test.sh", *words)
        assert (done.returncode, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        assert line.startswith(reason)


def test_patience_multiplies_limits_in_its_lane_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PATIENCE, raising=False)
    assert patient_s(120) == 120
    monkeypatch.setenv(PATIENCE, "5")
    assert patient_s(120) == 600
    assert f"{PATIENCE}=$NXD_PATIENCE" in SCRIPT


def test_pytest_finds_every_lane_by_itself(request: pytest.FixtureRequest) -> None:
    """Its own list of folders to leave out has `dist`."""
    lanes = [folder.name for folder in (ROOT / "tests").iterdir() if any(folder.glob("test_*.py"))]
    assert "dist" in lanes
    patterns = request.config.getini("norecursedirs")
    assert not [lane for lane in lanes for pattern in patterns if fnmatch(lane, pattern)]
