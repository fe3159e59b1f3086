"""Every import and call of NeuronX Distributed fits all of its recorded releases."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from nxtrain.backends.neuron.sdk import DISTRIBUTED, RELEASES, Package, unverified
from tests.support.nxd_cpu import COMMITS, FILE, PACKAGE, Entry, Table, dump, recorded, scan


def violations(source: str, table: Table) -> list[str]:
    """Every import, attribute and call that does not fit, with its line.

    Calls are those of a name, of an attribute of a module or class, and of `super()` in a subclass. What a call returns
    and what an object carries is not followed.
    """
    reader = _Reader(table)
    reader.visit(ast.parse(source))
    return [f"line {line}: {text}" for line, text in sorted(set(reader.findings))]


class _Reader(ast.NodeVisitor):
    def __init__(self, table: Table) -> None:
        self._table = table
        self._names: dict[str, str] = {}
        self._bases: list[list[str]] = []
        self.findings: list[tuple[int, str]] = []

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
        is_package = any(versions.startswith(f"{name}.") for versions in self._table)
        if self._find(name) is None and not is_package:
            self._report(node, f"{name} is not among the recorded names")

    def _report(self, node: ast.AST, text: str) -> None:
        self.findings.append((node.lineno, text))  # type: ignore[attr-defined]


def _is_nxd(name: str) -> bool:
    return name.partition(".")[0] == PACKAGE


ROOT = Path(__file__).parents[3] / "nxtrain" / "backends" / "neuron"
FILES = sorted(ROOT.rglob("*.py"))

TABLE = {
    "neuronx_distributed": Entry("module"),
    "neuronx_distributed.layers": Entry("module"),
    "neuronx_distributed.layers.Base": Entry("class", bases=["torch.nn.Module"]),
    "neuronx_distributed.layers.Base.__init__": Entry("method", ["self", "rank", "group=None"]),
    "neuronx_distributed.layers.Base.gather": Entry("method", ["self", "x"]),
    "neuronx_distributed.layers.Column": Entry("class", bases=["neuronx_distributed.layers.Base"]),
    "neuronx_distributed.layers.Column.forward": Entry("method", ["self", "x", "/", "*", "dim=0"]),
    "neuronx_distributed.layers.reduce": Entry("function", ["x", "*groups", "scale", "**options"]),
    "neuronx_distributed.layers.LIMIT": Entry("value"),
    "neuronx_distributed.Column": Entry("alias", target="neuronx_distributed.layers.Column"),
}
"""A release of few names."""

RIGHT = [
    "from neuronx_distributed.layers import Column as C\nC(1)\nC(rank=1, group=2)\nC(1, **options)\nC(*args)",
    "from neuronx_distributed import Column\nColumn(1).anything(2)",
    "from neuronx_distributed import layers\nlayers.reduce(1, 2, 3, scale=1.0, other=4)\nlayers.LIMIT.anything",
    "import neuronx_distributed.layers\nneuronx_distributed.layers.Column.gather(1, 2)",
    "import neuronx_distributed.layers as n\nn.reduce = print",
    "from neuronx_distributed.layers import Column\nclass A(Column):\n def forward(self, x):\n  super().__init__(1)\n"
    "  return super().forward(x, dim=1) + super().gather(x) + super().register_buffer('a', x)",
    "from torch import Column\nColumn(1, 2, 3, 4)",
]

MUTANTS = {
    "from neuronx_distributed.layers import Colum": "line 1: neuronx_distributed.layers.Colum is not among",
    "from neuronx_distributed.layer import Column": "line 1: neuronx_distributed.layer.Column is not",
    "import neuronx_distributed.layer": "line 1: neuronx_distributed.layer is not among",
    "from neuronx_distributed import layers\n\nlayers.reduces": "line 3: neuronx_distributed.layers.reduces is not",
    "import neuronx_distributed.layers as n\nn.reduces = print": "line 2: neuronx_distributed.layers.reduces is not",
    "from neuronx_distributed import Column\nColumn()": "missing a required argument: 'rank'",
    "from neuronx_distributed import Column\nColumn(1, grup=2)": "unexpected keyword argument 'grup'",
    "from neuronx_distributed import Column\nColumn(**a, grup=2)": "unexpected keyword argument 'grup'",
    "from neuronx_distributed import Column\nColumn(1, 2, 3)": "too many positional arguments",
    "from neuronx_distributed import Column\nColumn.gather(1)": "missing a required argument: 'x'",
    "from neuronx_distributed.layers import reduce\nreduce(1)": "missing a required argument: 'scale'",
    "from neuronx_distributed import Column\nclass A(Column):\n def f(self):\n  super().__init__(group=1)": "'rank'",
    "from neuronx_distributed import Column\nclass A(Column):\n def f(self):\n  super().forward(x=1)": "'x'",
    "from neuronx_distributed import Column\nclass A(Column):\n def f(self):\n  super().forward(1, 2)": "too many",
    "from neuronx_distributed import Column\nclass A(Column):\n def f(self):\n  super().fetch()": "has no fetch",
}


@pytest.mark.parametrize("source", RIGHT)
def test_use_that_fits_passes(source: str) -> None:
    assert violations(source, TABLE) == []


@pytest.mark.parametrize("source", MUTANTS)
def test_use_that_does_not_fit_is_named_with_its_line(source: str) -> None:
    (result,) = violations(source, TABLE)
    assert MUTANTS[source] in result


@pytest.mark.parametrize("version", COMMITS)
@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_what_we_call_is_there_in_every_release(file: Path, version: str) -> None:
    assert violations(file.read_text(encoding="utf-8"), recorded()[version]) == []


def test_every_release_that_is_used_without_being_asked_is_recorded() -> None:
    """0.19, of SDK 2.30 and 2.31, has no public source, so nothing can be recorded of it."""
    versions = {version.rpartition(".")[0] for version in COMMITS}
    first, last = DISTRIBUTED
    assert versions == {f"0.{minor}" for minor in range(first[1], last[1] + 1)}
    shipped = {release.neuronx_distributed for release in RELEASES.values()}
    assert {
        version for version in shipped if not unverified(Package("neuronx-distributed", f"{version}.1"))
    } <= versions
    assert shipped - versions == {"0.19"}


def test_the_file_is_what_the_recorder_writes() -> None:
    assert dump(recorded()) == FILE.read_text(encoding="utf-8")


def test_a_source_tree_is_read_without_importing_it(tmp_path: Path) -> None:
    package = tmp_path / "neuronx_distributed"
    layers = package / "parallel_layers"
    layers.mkdir(parents=True)
    (package / "_version.py").write_text('__version__ = "1.2.0"\n')
    (package / "__init__.py").write_text("raise RuntimeError\nfrom .parallel_layers.layers import Column as C\n")
    (layers / "layers.py").write_text(
        "import torch\nfrom ..utils import cpu\n"
        "try:\n    LIMIT: int = 1\nexcept ImportError:\n    pass\n"
        "class Column(torch.nn.Module):\n    def __init__(self, a, /, b, *, c, d=(1, 2), **e): ...\n"
        "    def _hidden(self): ...\n"
        "    @staticmethod\n    def of(x=torch.float32, *args): ...\n"
        "class Fused(Column): ...\n"
        "if True:\n    def reduce(x): ...\n"
    )
    version, table = scan(tmp_path)
    assert version == "1.2.0"
    name = "neuronx_distributed.parallel_layers.layers"
    assert table == {
        "neuronx_distributed": Entry("module"),
        "neuronx_distributed.C": Entry("alias", target=f"{name}.Column"),
        name: Entry("module"),
        f"{name}.cpu": Entry("alias", target="neuronx_distributed.utils.cpu"),
        f"{name}.LIMIT": Entry("value"),
        f"{name}.Column": Entry("class", bases=["torch.nn.Module"]),
        f"{name}.Column.__init__": Entry("method", ["self", "a", "/", "b", "*", "c", "d=(1, 2)", "**e"]),
        f"{name}.Column.of": Entry("static", ["x=torch.float32", "*args"]),
        f"{name}.Fused": Entry("class", bases=[f"{name}.Column"]),
        f"{name}.reduce": Entry("function", ["x"]),
    }
