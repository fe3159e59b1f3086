"""`scripts/setup.sh`: the Python of several that the environment is made from."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

STAND_IN = """#!/bin/sh
case $1 in
    -V) echo "Python {version}" ;;
    -c) [ {version} != 3.9 ] ;;
    -) {answer} ;;
esac
"""


def chosen(folder: Path, pythons: Mapping[str, str], **variables: str) -> subprocess.CompletedProcess[str]:
    for name, text in pythons.items():
        version, _, took_us = text.partition(" ")
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        answer = f"echo {took_us}" if took_us else "exit 1"
        file.write_text(STAND_IN.format(version=version, answer=answer), encoding="utf-8")
        file.chmod(0o755)
    path = ":".join([*dict.fromkeys(str((folder / name).parent) for name in pythons)])
    script = f'set -euo pipefail; source scripts/setup.sh; PATH="{path}"; find_python'
    env = {"PATH": "/usr/bin:/bin", **variables}
    return subprocess.run(["bash", "-c", script], cwd=ROOT, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("pythons", "expected"),
    [
        ({"a/python3": "3.12 4000", "b/python3": "3.11 3300"}, "a/python3"),
        ({"a/python3": "3.12 4000", "b/python3": "3.11 3100"}, "b/python3"),
        ({"a/python3": "3.12 4000", "a/python3.11": "3.11 2000", "b/python3": "3.10 2600"}, "a/python3.11"),
        ({"a/python3": "3.9 1000", "b/python3": "3.11 4000"}, "b/python3"),
        ({"a/python3": "3.12 4000", "b/python3": "3.11"}, "a/python3"),
        ({"a/python3": "3.12", "b/python3": "3.11 9000"}, "b/python3"),
        ({"a/python3": "3.12"}, "a/python3"),
    ],
    ids=["first", "faster", "fastest", "too old", "no headers", "no environments", "the only one"],
)
def test_the_first_python_that_suits_or_a_faster_one(tmp_path: Path, pythons: dict[str, str], expected: str) -> None:
    done = chosen(tmp_path, pythons)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path / expected}\n"


def test_the_python_that_is_named_is_taken_however_slow(tmp_path: Path) -> None:
    pythons = {"a/python3": "3.12 1000", "b/python3.10": "3.10 9000"}
    assert chosen(tmp_path, pythons, PYTHON="python3.10").stdout == f"{tmp_path / 'b/python3.10'}\n"


@pytest.mark.parametrize("named", ["", "python2"])
def test_without_a_python_that_suits_the_error_names_those_it_found(tmp_path: Path, named: str) -> None:
    done = chosen(tmp_path, {"a/python3": "3.9 1000"}, **({"PYTHON": named} if named else {}))
    found = "none" if named else f"{tmp_path / 'a/python3'} (Python 3.9)"
    assert (done.returncode, done.stdout) == (5, "")
    assert f"found: {found}. Install one, or name it: PYTHON=" in done.stderr
