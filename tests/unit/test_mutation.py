"""The harness that puts defects into copies of the source: its defects, its verdicts, and the sound source kept."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.mutants import mutants
from tests.support.mutation import COVERED, draw, sources, stages_of

ROOT = Path(__file__).parents[2]
FOLDERS = [f"nxtrain/{name}" for name in ("parallel", "optim", "nn", "checkpoint")]

CHANGES = {
    ("x = a + b", "arithmetic"): {"x = (a - b)"},
    ("x = a * b", "arithmetic"): {"x = (a / b)"},
    ("x = a // b", "arithmetic"): {"x = (a * b)"},
    ("x += a", "arithmetic"): {"x -= a"},
    ("x += a", "delete assignment"): {"pass"},
    ("x = -a", "sign"): {"x = (a)"},
    ("x = a < b", "comparison"): {"x = (a <= b)"},
    ("x = a == b", "comparison"): {"x = (a != b)"},
    ("x = a in b", "comparison"): {"x = (a not in b)"},
    ("x = 0 < a < b", "comparison"): {"x = (0 <= a < b)", "x = (0 < a <= b)"},
    ("x = a and b", "and/or"): {"x = (a or b)"},
    ("x = not a", "drop not"): {"x = (a)"},
    ("x = a if b else c", "other branch"): {"x = (c if b else a)"},
    ("x = 3", "constant"): {"x = 4", "x = 2"},
    ("x = True", "constant"): {"x = False"},
    ("x = 0.5", "constant"): {"x = 1.0"},
    ("x = max(a, b)", "function"): {"x = min(a, b)"},
    ("x = torch.float32", "type"): {"x = torch.bfloat16"},
    ("f(a)", "delete statement"): {"pass"},
    ("x.y = a", "delete assignment"): {"pass"},
    ("def f():\n    return a", "return None"): {"def f():\n    return None"},
    ("x = f(a, b, c)", "swap arguments"): {"x = f(b, a, c)", "x = f(a, c, b)"},
    ("x = f(a, b=c)", "drop argument"): {"x = f(a)"},
    ("x = a[b:c]", "slice"): {"x = a[:c]", "x = a[b:]"},
    ("@torch.no_grad()\ndef f(): ...", "drop decorator"): {"@(lambda function: function)\ndef f(): ..."},
}


@pytest.mark.parametrize(("source", "operator"), CHANGES)
def test_each_kind_of_defect_changes_what_it_should(source: str, operator: str) -> None:
    found = {mutant.source for mutant in mutants(source) if mutant.operator == operator}
    assert found == CHANGES[source, operator]


def test_every_kind_is_among_the_examples_and_changes_the_library_so_that_it_compiles() -> None:
    drawn = draw(ROOT, FOLDERS, 60, 1)
    for each in drawn:
        sound = (ROOT / each.path).read_text(encoding="utf-8")
        assert ast.dump(ast.parse(each.mutant.source)) != ast.dump(ast.parse(sound)), each
        compile(each.mutant.source, each.path, "exec")
    assert {each.mutant.operator for each in drawn} == {operator for _, operator in CHANGES}


@pytest.mark.parametrize(
    "source",
    [
        '"""A module\'s docstring of 3 words."""',
        "x: Literal[3]",
        "def f(x: Literal[3]) -> Literal[4]: ...",
        "assert a == 3",
        "raise ValueError(f(a, 3))",
        'x = f"{a + 3}"',
        "if TYPE_CHECKING:\n    f(a)",
        "for x in zip(a, strict=True): ...",
        "@dataclass(frozen=True)\nclass A: ...",
    ],
)
def test_what_no_run_reads_stays_as_it_is(source: str) -> None:
    assert mutants(source) == []


def test_a_seed_draws_the_same_mutants_and_kinds_take_turns() -> None:
    first, again, other = (draw(ROOT, ["nxtrain/optim"], 30, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert len(set(first)) == 30
    kinds = [drawn.mutant.operator for drawn in first]
    assert len(set(kinds)) > 10 and max(map(kinds.count, kinds)) <= 3
    (only, *_) = draw(ROOT, ["nxtrain/optim/rounding.py"], 1, 1, ["slice"])
    assert (only.path, only.mutant.operator) == ("nxtrain/optim/rounding.py", "slice")


def test_every_file_has_tests_that_exist() -> None:
    for path in sources(ROOT, FOLDERS):
        for selection in stages_of(path):
            assert selection and all((ROOT / test).exists() for test in selection)
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "nxtrain").rglob("*.py")}
    assert {pattern for pattern in COVERED if "*" not in pattern} <= files


TRIED = {
    "value = 1 + 1\n": "survived",
    "value = 1 * 1\n": "killed",
    "import time\nvalue = 1 - 1\ntime.sleep(90 if value else 0)\n": "timeout",
    "value = 7 + 0\n": "no measure",
}
"""A module and the fate of its arithmetic mutant; its test wants a value from 0 to 1 or equal to 2."""

TRY = """
import json, sys
from pathlib import Path
import pytest  # once, and not in each fork
from tests.support import mutation
mutation.CARRIED = ("nxtrain", "tests", "pyproject.toml")
stages = (("tests/test_one.py",), ("tests/test_two.py",))
for name, limit_s in json.loads(sys.argv[2]):
    folder, root = Path(sys.argv[1], name, "folder"), Path(sys.argv[1], name, "root")
    tree = mutation.Tree(root, folder)
    try:
        tree.check(stages)
    except RuntimeError as error:
        print(json.dumps(["no measure", str(error), ""]))
        continue
    (drawn,) = mutation.draw(root, ["nxtrain/module.py"], 1, 1, ["arithmetic"])
    found = tree.outcome(drawn, stages, [30.0, limit_s])
    copy = (tree.path / "nxtrain/module.py").read_text()
    print(json.dumps([found.kind, found.by, copy]))
"""


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Outcomes of the arithmetic mutant of each package of one module, tried by one process: kind, test, and copy."""
    base = tmp_path_factory.mktemp("tried")
    # The mutant that never ends needs no patience; the others end in moments, but on a busy machine too.
    cases = [(str(number), 2.0 if fate == "timeout" else 30.0) for number, fate in enumerate(TRIED.values())]
    for (name, _), module in zip(cases, TRIED, strict=True):
        write_package(base / name, module)
    argv = [sys.executable, "-c", TRY, str(base), json.dumps(cases)]
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # the tests of the module need none
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    for (name, _), module in zip(cases, TRIED, strict=True):
        assert (base / name / "root/nxtrain/module.py").read_text() == module
    return dict(zip(TRIED, map(json.loads, done.stdout.splitlines()[-len(cases) :]), strict=True))


def write_package(folder: Path, module: str) -> None:
    """Write a package of one module with its tests, and make the folder for its copy."""
    root = folder / "root"
    for each in (root / "nxtrain", root / "tests", folder / "folder"):
        each.mkdir(parents=True)
    (root / "nxtrain/__init__.py").touch()
    (root / "nxtrain/module.py").write_text(module)
    (root / "pyproject.toml").write_text('[tool.pytest.ini_options]\npythonpath = ["."]\n')
    (root / "tests/test_one.py").write_text("def test_always():\n    assert True\n")
    test = "from nxtrain.module import value\n\n\ndef test_value():\n    assert value in (0, 2) or str(value) == '1'\n"
    (root / "tests/test_two.py").write_text(test)


@pytest.mark.parametrize("module", [module for module, fate in TRIED.items() if fate != "no measure"])
def test_mutants_are_killed_survive_or_time_out_and_the_source_is_never_touched(
    tried: dict[str, list[str]], module: str
) -> None:
    kind, by, copy = tried[module]
    assert kind == TRIED[module]
    assert (
        by
        == {
            "survived": "",
            "killed": "tests/test_two.py::test_value",
            "timeout": "tests/test_two.py",
        }[kind]
    )
    assert copy == module, "the next mutant begins with the sound source"


def test_tests_that_fail_without_a_defect_are_no_measure(tried: dict[str, list[str]]) -> None:
    kind, error, _ = tried["value = 7 + 0\n"]
    assert kind == "no measure"
    assert error.startswith("tests/test_two.py::test_value fails without any defect")


def test_the_command_lists_what_it_would_try() -> None:
    argv = [sys.executable, "scripts/mutate.py", "3", "nxtrain/nn/rope.py", "--number", "5", "--list"]
    lines = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) == 5
    assert all(line.startswith("nxtrain/nn/rope.py:") and " -> " in line for line in lines)
