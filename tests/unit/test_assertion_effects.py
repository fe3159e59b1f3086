"""Assertions of the library: `python -O` removes them, so that no result may depend on one."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIBRARY = sorted(path for folder in ("nxtrain", "models") for path in (ROOT / folder).rglob("*.py"))

PURE = {"all", "any", "isinstance", "len", "list", "max", "min", "range", "set", "sorted", "sum", "tuple"}
"""Builtins without effect."""
READING = {
    "axis.group_of": "arithmetic of ranks",
    "corpus.content": "reads a corpus in memory, which the function made",
    "counted.is_contiguous": "asks a tensor",
    "dist.get_process_group_ranks": "asks a process group",
}
"""Other functions that assertions call, and the reason why they have no effect."""


def effects(text: str) -> list[str]:
    """Expressions in assertions that may have an effect, with their lines."""
    found = []
    for node in [each for each in ast.walk(ast.parse(text)) if isinstance(each, ast.Assert)]:
        for part in ast.walk(node.test):
            is_call = isinstance(part, ast.Call) and ast.unparse(part.func) not in PURE | READING.keys()
            if is_call or isinstance(part, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom):
                found.append(f"{node.lineno}: {ast.unparse(part)}")
    return found


def test_no_assertion_has_an_effect() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{effect}" for path in LIBRARY for effect in effects(path.read_text(encoding="utf-8"))
    ]
    assert not found, "call it before the assertion, or give the reason in READING:\n" + "\n".join(found)


def test_the_list_of_reading_functions_holds_nothing_else() -> None:
    texts = [path.read_text(encoding="utf-8") for path in LIBRARY]
    called = {
        ast.unparse(part.func)
        for text in texts
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Assert)
        for part in ast.walk(node.test)
        if isinstance(part, ast.Call)
    }
    assert called >= READING.keys()


@pytest.mark.parametrize(
    "test",
    ["d.setdefault(k, v) == v", "d.pop(k)", "s.add(k) is None", "next(it)", "(n := f)", "path.unlink() is None", "f()"],
)
def test_an_effect_is_found(test: str) -> None:
    assert effects(f"def g():\n    assert {test}, 'why'\n")


@pytest.mark.parametrize("test", ["len(d) == 3", "x is not None", "isinstance(x, int)", "sorted(d) == [*range(3)]"])
def test_a_plain_comparison_is_no_effect(test: str) -> None:
    assert not effects(f"assert {test}, f(x)\n")
