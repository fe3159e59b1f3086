"""Defects that a source file may get, one at a time: each replaces one expression or statement by a neighbour of it."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_BINARY: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
}
_COMPARISON: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_NAMES = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "float32": "bfloat16",
    "bfloat16": "float32",
    "reversed": "list",
}
_GUARDS = ("no_grad",)
"""Decorators that a defect drops; without most others nothing would import."""


@dataclass(frozen=True)
class Mutant:
    """A source with one defect."""

    operator: str
    line: int
    before: str
    after: str
    source: str

    def __str__(self) -> str:
        return f"{self.operator}: {_short(self.before)} -> {_short(self.after)}"


def mutants(source: str) -> list[Mutant]:
    """All defects of a file, in the order of its text.

    Annotations, docstrings, assertions, raised errors and blocks for type checkers stay as they are.
    """
    tree = ast.parse(source)
    lines = source.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    whole, found, seen = source.encode(), [], set()
    for node, change in _changes(tree):
        low = starts[node.lineno - 1] + node.col_offset
        high = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        before = whole[low:high].decode()
        for operator, after in change:
            text = (whole[:low] + after.encode() + whole[high:]).decode()
            if after == before or text in seen:
                continue
            seen.add(text)
            found.append(Mutant(operator, node.lineno, before, after, text))
    return sorted(found, key=lambda mutant: mutant.line)


_Located = ast.expr | ast.stmt


def _changes(node: ast.AST) -> Iterator[tuple[_Located, list[tuple[str, str]]]]:
    """Every expression and statement that may change, with the operators and the texts that replace it."""
    for child in _children(node):
        if isinstance(child, (ast.expr, ast.stmt)) and not isinstance(child, ast.JoinedStr):
            changes = [change for operator in _OPERATORS for change in operator(child)]
            if changes:
                yield child, changes
            for keyword in getattr(child, "decorator_list", []):
                if _name(keyword) in _GUARDS:
                    yield keyword, [("drop decorator", "(lambda function: function)")]
        yield from _changes(child)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, (ast.Assert, ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom)):
        return
    if isinstance(node, ast.If) and _name(node.test) == "TYPE_CHECKING":
        return
    skipped = {"annotation", "returns", "decorator_list", "bases", "type_ignores"}
    for field, value in ast.iter_fields(node):
        if field in skipped or (isinstance(node, ast.keyword) and node.arg == "strict"):  # sound code always passes it
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_docstring(child):
                yield child


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _name(node: ast.AST) -> str:
    """The last name of `a.b.c` or `a.b.c()`."""
    if isinstance(node, ast.Call):
        return _name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _short(text: str) -> str:
    one_line = " ".join(text.split())
    return one_line if len(one_line) <= 70 else f"{one_line[:67]}..."


def _arithmetic(node: _Located) -> Iterator[tuple[str, str]]:
    if isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in _BINARY:
        yield "arithmetic", _with(node, op=_BINARY[type(node.op)]())
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
        yield "sign", f"({ast.unparse(node.operand)})"


def _logic(node: _Located) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Compare):
        for index, op in enumerate(node.ops):
            yield "comparison", _with(node, ops=[*node.ops[:index], _COMPARISON[type(op)](), *node.ops[index + 1 :]])
    if isinstance(node, ast.BoolOp):
        yield "and/or", _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "drop not", f"({ast.unparse(node.operand)})"
    if isinstance(node, ast.IfExp):
        yield "other branch", _with(node, body=node.orelse, orelse=node.body)


def _constant(node: _Located) -> Iterator[tuple[str, str]]:
    if not isinstance(node, ast.Constant):
        return
    value = node.value
    if isinstance(value, bool):
        yield "constant", repr(not value)
    elif isinstance(value, int):
        yield "constant", repr(value + 1)
        yield "constant", repr(value - 1) if value else "(-1)"
    elif isinstance(value, float):
        yield "constant", repr(value * 2 if value else 1.0)


def _names(node: _Located) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Attribute) and node.attr in _NAMES:
        yield "type", _with(node, attr=_NAMES[node.attr])
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _NAMES:
        yield "function", _with(node, func=ast.Name(_NAMES[node.func.id]))


def _statement(node: _Located) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Expr) and isinstance(node.value, (ast.Call, ast.YieldFrom)):
        yield "delete statement", "pass"
    if isinstance(node, ast.Assign) and all(isinstance(to, (ast.Attribute, ast.Subscript)) for to in node.targets):
        yield "delete assignment", "pass"
    if isinstance(node, ast.AugAssign):
        yield "delete assignment", "pass"
    if isinstance(node, (ast.Continue, ast.Break)):
        yield "delete statement", "pass"
    if isinstance(node, ast.Return) and node.value is not None:
        yield "return None", "return None"


def _arguments(node: _Located) -> Iterator[tuple[str, str]]:
    if not isinstance(node, ast.Call):
        return
    for index in range(len(node.args) - 1):
        first, second = node.args[index], node.args[index + 1]
        if not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred):
            yield "swap arguments", _with(node, args=[*node.args[:index], second, first, *node.args[index + 2 :]])
    for index, keyword in enumerate(node.keywords):
        if keyword.arg not in (None, "strict"):
            yield "drop argument", _with(node, keywords=node.keywords[:index] + node.keywords[index + 1 :])


def _slices(node: _Located) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        for bound in ("lower", "upper", "step"):
            if getattr(node.slice, bound) is not None:
                shorter = copy.copy(node.slice)
                setattr(shorter, bound, None)
                yield "slice", _with(node, slice=shorter)


_OPERATORS: tuple[Callable[[_Located], Iterator[tuple[str, str]]], ...] = (
    _arithmetic,
    _logic,
    _constant,
    _names,
    _statement,
    _arguments,
    _slices,
)


def _with(node: _Located, **fields: object) -> str:
    """The text of a node with other fields; in brackets, since the text around it may bind closer."""
    changed = copy.copy(node)
    for field, value in fields.items():
        setattr(changed, field, value)
    text = ast.unparse(ast.fix_missing_locations(changed))
    return f"({text})" if isinstance(node, (ast.BinOp, ast.Compare, ast.BoolOp, ast.IfExp)) else text
