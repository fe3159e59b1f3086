"""Docstrings begin with a noun or a verb, and public names are terms of the field."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache

from tests.support import ROOT

FOLDERS = ("nxtrain", "models", "scripts", "tests")
QUESTION_WORDS = frozenset({"how", "what", "where", "whether", "which", "who", "whose", "why"})
OLD_WORDS = frozenset(
    {"arrivals", "aside", "befall", "board", "heed", "heeds", "lasting", "leave", "lineage", "meeting", "parting"}
    | {"saver", "say", "says", "tell", "tells", "told", "unsteady"}
)
"""Everyday words; `docs/glossary.md` has the terms in their place."""
PROPER_NAMES = frozenset({"TensorBoardSink", "tell"})  # the second is a method of files


def first_lines(source: str) -> Iterator[tuple[int, str]]:
    """Line number and first docstring line of a module and of everything it defines, private names included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text.splitlines()[0].strip()
            yield from _attribute_lines(node.body)


def offends(line: str) -> bool:
    """True for a first line that begins with a question word."""
    word = line.split(maxsplit=1)[0] if line.split() else ""
    return word.strip("`'\"*_.,:;()-").partition("'")[0].lower() in QUESTION_WORDS


@cache
def offences() -> list[tuple[str, str]]:
    """Place (`path:line`) and first line of every docstring that offends."""
    return [
        (f"{path.relative_to(ROOT)}:{number}", line)
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for number, line in first_lines(path.read_text(encoding="utf-8"))
        if offends(line)
    ]


def public_names(source: str) -> Iterator[tuple[int, str]]:
    """Line number and name of each public class, function and method."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            yield node.lineno, node.name


def riddles(name: str) -> set[str]:
    """Words of a name, in CamelCase or with underscores, that no term of the field has."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+", name)} & OLD_WORDS


def _attribute_lines(body: Iterable[ast.stmt]) -> Iterator[tuple[int, str]]:
    """First lines of the strings below assignments, which document constants and fields."""
    previous: ast.stmt | None = None
    for statement in body:
        if (
            isinstance(previous, ast.Assign | ast.AnnAssign)
            and isinstance(statement, ast.Expr)
            and isinstance(statement.value, ast.Constant)
            and isinstance(statement.value.value, str)
        ):
            yield statement.lineno, statement.value.value.strip().partition("\n")[0]
        previous = statement


def test_no_docstring_begins_with_a_question_word() -> None:
    refused = [f"{location}: {line}" for location, line in offences()]
    assert not refused, "begin these with a noun or a verb:\n" + "\n".join(refused)


def test_public_names_are_terms_of_the_field() -> None:
    refused = []
    for path in sorted([*(ROOT / "nxtrain").rglob("*.py"), *(ROOT / "models").rglob("*.py")]):
        names = [(1, path.stem), *public_names(path.read_text(encoding="utf-8"))]
        refused += [
            f"{path.relative_to(ROOT)}:{line}: {name}"
            for line, name in names
            if riddles(name) and name not in PROPER_NAMES
        ]
    assert not refused, "take these names from docs/glossary.md:\n" + "\n".join(refused)
