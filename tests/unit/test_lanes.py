"""`scripts/test.sh` on a stand-in for pytest, and the Python that `scripts/setup.sh` chooses."""

from __future__ import annotations

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.conftest import SKIPS_FILE
from tests.support import ROOT

LANES = ("device", "unit", "dist", "xla", "train", "faults", "cuda-sim")

COVERING = """# a comment that names tests/dist/test_no.py
tests/dist/test_a.py
tests/dist/test_b.py::test_few[1 of 2]

tests/xla/test_a.py
"""

STAND_IN = """#!/usr/bin/env bash
case "$1" in
    -V) echo "Python 3.11.0" && exit ;;
    -c) echo 2.9.0 && exit ;;
esac
if [ -n "${PYTHONDONTWRITEBYTECODE:-}" ]; then echo "each process compiles all it imports" && exit 1; fi
shift 2
echo "$OMP_NUM_THREADS $*" >>calls
if [[ -n "${HANGS:-}" && "$*" =~ $HANGS ]]; then
    echo $$ >>hangs
    exec sleep 600
fi
if [ -n "${IN_STEP:-}" ]; then  # xla goes on until train has begun, and ends before train does
    for _ in {1..1000}; do
        case "$*" in
            tests/xla*) ! grep -q tests/train calls || break ;;
            *tests/train*without*) [ ! -e build/xla.log.end ] || break ;;
            *) break ;;
        esac
        sleep 0.02
    done
fi
while read -r code words; do
    if [[ "$*" == *"$words"* ]]; then exit "$code"; fi
done <codes
"""


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """The scripts in a folder with all lanes, on a machine of two cores."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    for lane in LANES:
        folder = tmp_path / "tests" / lane.replace("-", "_")
        folder.mkdir(parents=True)
        (folder / "test_a.py").touch()
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "codes").touch()
    (tmp_path / "tests" / "covering.txt").write_text(COVERING, encoding="utf-8")
    programs = {f".venv/bin/{name}": "#!/bin/sh\nexit 0\n" for name in ("ruff", "mypy", "lint-imports")}
    programs |= {".venv/bin/python": STAND_IN, "bin/getconf": "#!/bin/sh\necho 2\n"}
    for name, text in programs.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    ready = 'source scripts/setup.sh; venv=.venv packages=".[xla,dev] $TRL"; fingerprint >.venv/nxtrain-setup'
    subprocess.run(["bash", "-c", ready], cwd=tmp_path, check=True)
    return tmp_path


def environ(house: Path, **variables: str) -> dict[str, str]:
    left_out = {"PYTHON", "NXTRAIN_TORCH", "OMP_NUM_THREADS", SKIPS_FILE}
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    path = f"{house / 'bin'}:{os.environ['PATH']}"
    return {**kept, "PATH": path, "PYTHONDONTWRITEBYTECODE": "1", **variables}


def run(house: Path, *words: str, codes: Sequence[str] = (), **variables: str) -> subprocess.CompletedProcess[str]:
    """The script, where the stand-in ends with the first code whose words its arguments have."""
    (house / "codes").write_text("".join(f"{line}\n" for line in codes), encoding="utf-8")
    argv = ["bash", "scripts/test.sh", *words]
    env = environ(house, **variables)
    return subprocess.run(argv, cwd=house, env=env, capture_output=True, text=True, timeout=60, check=False)


def calls(house: Path) -> list[str]:
    """Arguments of the calls of pytest, but for those that count tests."""
    lines = (house / "calls").read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if "--collect-only" not in line]


def verdicts(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    return dict(re.findall(r"^([\w-]+) +\d+ s  (.*)$", done.stdout, flags=re.MULTILINE))


def test_lanes_keep_two_cores_busy_and_what_is_measured_comes_last(house: Path) -> None:
    done = run(house, "all", "--", "-k", "mesh", IN_STEP="1")
    assert done.returncode == 0, done.stderr
    assert verdicts(done) == dict.fromkeys(("lint", *LANES), "passed")
    actual = calls(house)
    together = "1 -n {} --dist loadfile --no-loadscope-reorder tests/{} --alone=without -k mesh"
    # Train and faults have one less than without xla, which has ended before cuda-sim begins.
    workers = {"unit": 3, "dist": 2, "train": 2}
    expected = ["tests/device -k mesh", *(together.format(number, lane) for lane, number in workers.items())]
    expected.append("1 -n 3 --dist loadfile --no-loadscope-reorder tests/cuda_sim -k mesh")
    expected += [f"tests/{lane} --alone=only -k mesh" for lane in (*workers, "faults")]
    xla, faults = behind = ["1 tests/xla -k mesh", together.format(3, "faults")]
    assert [call for call in actual if call not in behind] == expected
    assert 2 <= actual.index(xla) < actual.index(faults) < actual.index(expected[-4])
    assert len(actual) == len(expected) + len(behind)


def test_a_lane_that_has_ended_behind_another_runs_once(house: Path) -> None:
    assert run(house, "all").returncode == 0
    assert len(calls(house)) == len({*calls(house)})


@pytest.mark.parametrize(
    ("lanes", "codes", "verdict", "code"),
    [
        (("train",), ["0 without", "5 only"], "passed", 0),
        (("train",), ["5 without", "0 only"], "passed", 0),
        (("train",), ["5 train"], "no test selected", 1),
        (("train",), ["1 without", "0 only"], "FAILED", 1),
        (("train",), ["0 without", "1 only"], "FAILED", 1),
        (("train",), ["1 without", "5 only"], "FAILED", 1),
        (("train",), ["5 without", "2 only"], "FAILED", 1),
        (("cuda-sim",), ["1 tests/cuda_sim"], "FAILED", 1),
        (("dist", "xla"), ["5 tests"], "no test selected", 1),
        (("dist", "xla"), ["0 xla", "5 tests"], "passed", 0),
        (("dist", "xla"), ["1 xla"], "FAILED", 1),
    ],
)
def test_all_parts_of_a_lane_make_its_verdict(
    house: Path, lanes: tuple[str, ...], codes: list[str], verdict: str, code: int
) -> None:
    """Tests that are measured are a part of their own, and the lane xla runs next to the others."""
    done = run(house, *lanes, codes=codes)
    assert (verdicts(done)[lanes[-1]], done.returncode) == (verdict, code), done.stdout


def test_lint_runs_behind_and_is_judged_when_it_has_ended(house: Path) -> None:
    """Alone it runs as any lane does, and its messages come before the verdicts either way."""
    (house / ".venv/bin/mypy").write_text("#!/bin/sh\necho an error of types\nexit 1\n", encoding="utf-8")
    for lanes in ((), ("all",), ("lint", "train"), ("lint",)):
        done = run(house, *lanes)
        assert done.returncode == 1
        result = verdicts(done)
        assert result.pop("lint") == "FAILED"
        assert set(result.values()) <= {"passed"}
        assert done.stdout.index("an error of types") < done.stdout.index("FAILED")


def test_lint_on_another_torch_leaves_out_its_types(house: Path) -> None:
    """The types of torch 2.15 refuse annotations that torch 2.9 needs."""
    (house / ".venv").rename(house / ".venv-torch-2.13.0")
    ready = 'source scripts/setup.sh; venv=.venv-torch-2.13.0 packages=".[dev] torch==2.13.0 $TRL"'
    subprocess.run(["bash", "-c", f"{ready}; fingerprint >$venv/nxtrain-setup"], cwd=house, check=True)
    (house / ".venv-torch-2.13.0" / "bin" / "mypy").write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    done = run(house, "lint", "--torch", "2.13.0")
    assert (verdicts(done), done.returncode) == ({"lint": "passed"}, 0), done.stdout + done.stderr
    assert "without mypy" in (done.stdout + done.stderr)


def test_an_interrupt_ends_everything(house: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # as in a terminal, whatever ignores it here
    script = subprocess.Popen(
        ["bash", "scripts/test.sh", "all"],
        cwd=house,
        env=environ(house, HANGS="tests/(xla|dist --alone=without)$"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    )
    signal.signal(signal.SIGINT, before)
    limit = time.monotonic() + 120
    hanging: list[int] = []
    while len(hanging) < 2 and time.monotonic() < limit:
        time.sleep(0.05)
        hanging = [int(pid) for pid in (house / "hangs").read_text().split()] if (house / "hangs").exists() else []
    try:
        os.killpg(script.pid, signal.SIGINT)  # as a terminal does: what runs behind has a group of its own
        said, _ = script.communicate(timeout=120)
        assert script.returncode == 130, said
        assert len(hanging) == 2
        assert [pid for pid in hanging if Path(f"/proc/{pid}").exists()] == []
        assert not any("tests/train" in call for call in calls(house))
    finally:
        for pid in (script.pid, *hanging):
            subprocess.run(["kill", "-KILL", str(pid)], check=False, capture_output=True)


def test_quick_is_lint_unit_and_smokes_that_exist(house: Path) -> None:
    assert verdicts(run(house, "quick")) == dict.fromkeys(("lint", "unit", "smokes"), "passed")
    unit, smokes, measured = calls(house)
    assert unit == "1 -n 2 --dist loadfile --no-loadscope-reorder tests/unit --alone=without --quick"
    assert measured == "tests/unit --alone=only --quick"
    result = re.findall(r"(tests/\w+/\w+\.py)::(\w+)", smokes)
    assert {Path(file).parts[1] for file, _ in result} == {"dist", "xla", "train", "faults"}
    for file, name in result:
        functions = ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
        assert name in {function.name for function in functions if isinstance(function, ast.FunctionDef)}, (file, name)
    assert run(house, "quick", "unit").returncode == 2


def test_without_a_lane_units_are_whole_and_other_lanes_run_their_covering_set(house: Path) -> None:
    assert verdicts(run(house)) == dict.fromkeys(("lint", *LANES), "passed")
    called = calls(house)
    options = "--dist loadfile --no-loadscope-reorder"
    chosen = "tests/dist/test_a.py tests/dist/test_b.py::test_few[1 of 2]"
    assert f"1 -n 3 {options} tests/unit --alone=without" in called
    assert f"1 -n 2 {options} {chosen} --alone=without" in called
    assert f"{chosen} --alone=only" in called
    assert "1 tests/xla/test_a.py" in called
    assert "tests/train --alone=only" in called  # a lane that the file does not name is whole
    assert run(house, "all", "unit").returncode == 2


def test_the_covering_set_has_tests_that_exist_of_every_lane_that_starts_ranks() -> None:
    lines = (ROOT / "tests" / "covering.txt").read_text(encoding="utf-8").splitlines()
    chosen = [line for line in lines if line and not line.startswith("#")]
    assert {Path(line).parts[1] for line in chosen} == {"dist", "xla", "train", "faults", "cuda_sim"}
    assert len(set(chosen)) == len(chosen)
    for line in chosen:
        file, _, name = line.partition("::")
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert not name or name.partition("[")[0] in functions, line


MARKED = """
import pytest  # a file of one test per choice; the skipped one shows that its reason reaches the summary

@pytest.mark.alone
def test_measures(): pass

@pytest.mark.slow
def test_is_larger(): pass

def test_is_skipped(): pytest.skip("why so")

def test_passes(): pass
"""


@pytest.mark.parametrize(
    ("options", "outcome", "skipped"),
    [
        (("-n", "2", "--alone=without"), "2 passed, 2 skipped", ["repeats a proof", "why so"]),
        (("--alone=only",), "1 passed, 3 deselected", []),
        (("--slow",), "4 passed, 1 skipped", ["why so"]),
    ],
)
def test_choices_among_tests_and_one_summary_of_skips(
    tmp_path: Path, options: Sequence[str], outcome: str, skipped: list[str]
) -> None:
    (tmp_path / "test_marked.py").write_text(MARKED, encoding="utf-8")
    (tmp_path / "test_other.py").write_text("def test_of_a_file_without_the_marker(): pass", encoding="utf-8")
    settings = ("-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, "-p", "tests.conftest", "-p", "no:cacheprovider")
    argv = [sys.executable, "-m", "pytest", tmp_path, "-q", *settings, *options]
    env = {**os.environ, SKIPS_FILE: str(tmp_path / "skips"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*map(str, argv)], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert f"{outcome} in" in done.stdout, done.stdout + done.stderr
    lines = (tmp_path / "skips").read_text(encoding="utf-8").splitlines()
    assert [line.split(" skipped: ")[1][: len(reason)] for line, reason in zip(lines, skipped, strict=True)] == skipped
    assert [int(line.split()[0]) for line in lines] == [1] * len(skipped)


PYTHON_PYTHON_STAND_IN = """#!/bin/sh
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
        file.write_text(PYTHON_PYTHON_STAND_IN.format(version=version, answer=answer), encoding="utf-8")
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
    result = "none" if named else f"{tmp_path / 'a/python3'} (Python 3.9)"
    assert (done.returncode, done.stdout) == (5, "")
    assert f"found: {result}. Install one, or name it: PYTHON=" in done.stderr
