"""Assertions of the tests: each claims what it compares, and no comparison hides in a message."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

OWN_SCOPES = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)
"""Parts of a message that may compare, since they choose what to show."""


def compares(node: ast.AST) -> bool:
    """True if the value of an expression has the result of a comparison in it."""
    if isinstance(node, OWN_SCOPES):
        return False
    if isinstance(node, ast.IfExp):
        return compares(node.body) or compares(node.orelse)
    return isinstance(node, ast.Compare) or any(compares(child) for child in ast.iter_child_nodes(node))


def hidden_claims(source: str) -> list[int]:
    """Lines of assertions whose message has a comparison, which Python evaluates only after the assertion failed."""
    asserts = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assert))
    return [node.lineno for node in asserts if node.msg is not None and compares(node.msg)]


@pytest.mark.parametrize(
    ("source", "is_hidden"),
    [
        ("assert a, b == (1, 2)", True),
        ("assert a, (b, c == 2)", True),
        ("assert a, not b in c", True),
        ("assert a, f'{b == c}'", True),
        ("assert a == b, c", False),
        ("assert a, [x for x in b if x != 1]", False),
        ("assert a, b if c > 1 else d", False),
    ],
)
def test_a_comparison_in_a_message_is_found(source: str, is_hidden: bool) -> None:
    assert hidden_claims(source) == ([1] if is_hidden else [])


def test_no_message_of_an_assertion_has_the_claim() -> None:
    files = sorted(TESTS.rglob("*.py"))
    assert len(files) > 300
    found = {str(path.relative_to(TESTS)): hidden_claims(path.read_text(encoding="utf-8")) for path in files}
    assert {name: lines for name, lines in found.items() if lines} == {}
