"""The table of faults names tests that there are, and leaves out no module of its lane."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
TABLE = (TESTS / "faults" / "README.md").read_text(encoding="utf-8")


def named() -> list[tuple[str, str]]:
    """File and function of every test that the table names; a name without a file belongs to the file before it."""
    found, file = list[tuple[str, str]](), ""
    for path, test in re.findall(r"`([\w/.]*)::(\w+)`", TABLE):
        file = path or file
        found.append((file, test))
    return found


def test_every_test_that_is_named_exists() -> None:
    for file, test in named():
        assert re.search(rf"^def {test}\(", (TESTS / file).read_text(encoding="utf-8"), re.MULTILINE), (file, test)


def test_there_are_all_kinds_of_faults_each_with_a_test() -> None:
    rows = re.findall(r"^\| (F\d\d) .*::test_", TABLE, re.MULTILINE)
    assert rows == [f"F{number:02}" for number in range(1, 30)]


def test_no_module_of_the_lane_is_left_out() -> None:
    for module in (TESTS / "faults").glob("test_*.py"):
        assert f"faults/{module.name}" in TABLE, f"{module.name} is not in the table"
