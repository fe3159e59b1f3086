"""Check of source code against a recorded table of NeuronX Distributed's names and signatures."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module

from tests.support.nxd_signatures import PACKAGE, Entry, Table


def violations(source: str, table: Table) -> list[str]:
    """Every import, attribute and call that does not fit, with its line.

    Calls are those of a name, of an attribute of a module or class, and of `super()` in a subclass. What a call returns
    and what an object carries is not followed.

    Args:
        source: Python.
        table: Of one release.
    """
    reader = _Reader(table)
    reader.visit(ast.parse(source))
    return [f"line {line}: {text}" for line, text in sorted(set(reader.found))]


class _Reader(ast.NodeVisitor):
    def __init__(self, table: Table) -> None:
        self._table = table
        self._names: dict[str, str] = {}
        self._bases: list[list[str]] = []
        self.found: list[tuple[int, str]] = []

    def visit_Import(self, node: ast.Import) -> None:
        """Modules under their own names."""
        for alias in node.names:
            if _is_nxd(alias.name):
                self._need(node, alias.name)
                self._names[alias.asname or PACKAGE] = alias.name if alias.asname else PACKAGE

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Names of a module."""
        if node.module and not node.level and _is_nxd(node.module):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                self._need(node, name)
                self._names[alias.asname or alias.name] = name

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Names reached through a module or a class."""
        name = self._resolve(node)
        if name is not None:
            self._need(node, name)
        else:
            self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Track the base classes that `super()` resolves to."""
        self._bases.append([name for base in node.bases if (name := self._resolve(base)) is not None])
        self.generic_visit(node)
        self._bases.pop()

    def visit_Call(self, node: ast.Call) -> None:
        """Arguments against parameters."""
        self.generic_visit(node)
        match node.func:
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super"), args=[])) if self._bases and self._bases[-1]:
                self._call_of_super(node, node.func.attr)
            case _:
                name = self._resolve(node.func)
                entry = self._find(name) if name is not None else None
                if name is not None and entry is not None:
                    self._bind(node, name, entry, bound=False)

    def _call_of_super(self, node: ast.Call, method: str) -> None:
        owner = self._bases[-1][0]
        entry = self._find(f"{owner}.{method}")
        if entry is not None:
            self._bind(node, f"{owner}.{method}", entry, bound=True)
        elif not any(hasattr(base, method) for base in self._foreign(owner)):
            self._report(node, f"{owner} has no {method}")

    def _bind(self, node: ast.Call, name: str, entry: Entry, *, bound: bool) -> None:
        if entry.kind == "class":
            init = self._find(f"{name}.__init__")
            if init is not None:
                self._bind(node, name, init, bound=True)
            return
        if entry.kind not in ("function", "method", "static"):
            return
        signature = entry.signature(without_self=bound and entry.kind == "method")
        spread = any(isinstance(arg, ast.Starred) for arg in node.args) or any(k.arg is None for k in node.keywords)
        positional = [arg for arg in node.args if not isinstance(arg, ast.Starred)]
        keywords = {keyword.arg: keyword for keyword in node.keywords if keyword.arg is not None}
        try:
            (signature.bind_partial if spread else signature.bind)(*positional, **keywords)
        except TypeError as error:
            self._report(node, f"{name}{signature}: {error}")

    def _resolve(self, node: ast.expr) -> str | None:
        """The name in full of what an expression stands for, if that is NeuronX Distributed's."""
        if isinstance(node, ast.Name):
            return self._names.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self._resolve(node.value)
            entry = self._find(owner) if owner is not None else None
            # A value's attributes are not recorded.
            if owner is not None and (entry is None or entry.kind in ("module", "class")):
                return f"{owner}.{node.attr}"
        return None

    def _find(self, name: str) -> Entry | None:
        """Meaning of a name, resolved through aliases and base classes."""
        entry = self._table.get(name)
        if entry is not None:
            if entry.kind != "alias":
                return entry
            return self._find(entry.target) or Entry("value")  # of a module that is not recorded
        owner, _, leaf = name.rpartition(".")
        above = self._table.get(owner)
        if above is None:
            return None
        if above.kind == "alias":
            return self._find(f"{above.target}.{leaf}")
        inherited = (self._find(f"{base}.{leaf}") for base in above.bases if _is_nxd(base))
        return next((entry for entry in inherited if entry is not None), None)

    def _foreign(self, name: str) -> Iterator[object]:
        """Base classes of other packages."""
        entry = self._find(name)
        for base in entry.bases if entry is not None else []:
            if _is_nxd(base):
                yield from self._foreign(base)
            elif base.startswith("torch."):
                module, _, leaf = base.rpartition(".")
                yield getattr(import_module(module), leaf)

    def _need(self, node: ast.AST, name: str) -> None:
        is_package = any(known.startswith(f"{name}.") for known in self._table)
        if self._find(name) is None and not is_package:
            self._report(node, f"{name} is not among the recorded names")

    def _report(self, node: ast.AST, text: str) -> None:
        self.found.append((node.lineno, text))  # type: ignore[attr-defined]


def _is_nxd(name: str) -> bool:
    return name.partition(".")[0] == PACKAGE
