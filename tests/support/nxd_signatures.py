"""The names of NeuronX Distributed and what its functions take, recorded per release.

    python -m tests.support.nxd_signatures SRC ...

writes `tests/golden/nxd_signatures.json` from source trees, each the folder `src` of a release. They are read, not
imported: what is kept of them are names, parameters and defaults.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "golden" / "nxd_signatures.json"
PACKAGE = "neuronx_distributed"

REPOSITORY = "https://github.com/aws-neuron/neuronx-distributed"
COMMITS = {
    "0.15.0": "fecfe75b0d40ff8831718e02584bcac8eb9550ae",
    "0.16.0": "47f695c2e23ce0fd6afc35529549ed41ba3cc16d",
    "0.17.0": "73ab227d1a76936f763a6631b324e2fc6650e0ba",
    "0.18.0": "fbac349b61a3adbb123c2983835af692840ff62f",
}
"""The releases with public source, of Neuron SDK 2.26 to 2.29; of 0.19 there is none."""

MODULES = (
    PACKAGE,
    *(
        f"{PACKAGE}.{name}"
        for name in (
            "kernels.flash_attn",
            "modules.qkv_linear",
            "modules.rms_norm",
            "optimizer.zero_redundancy_optimizer",
            "parallel_layers",
            "parallel_layers.comm",
            "parallel_layers.grads",
            "parallel_layers.layer_norm",
            "parallel_layers.layers",
            "parallel_layers.layers_utils",
            "parallel_layers.loss_functions",
            "parallel_layers.mappings",
            "parallel_layers.parallel_state",
            "parallel_layers.random",
            "parallel_layers.utils",
            "trainer.optimizer",
            "trainer.trainer",
        )
    ),
)
"""Names that training can be built on."""


@dataclass(frozen=True)
class Entry:
    """Meaning of one name.

    Args:
        kind: `static` is a method without self.
        parameters: Of a function or method, as written but for their types: `x`, `dim=0`, `*`, `**options`.
        bases: Of a class, in full where they are NeuronX Distributed's.
        target: Of an alias, the name in full.
    """

    kind: str
    parameters: list[str] = field(default_factory=list)
    bases: list[str] = field(default_factory=list)
    target: str = ""

    def signature(self, *, without_self: bool = False) -> Signature:
        """The parameters as `inspect` has them; a default is its source."""
        found: list[Parameter] = []
        keyword_only = False
        for text in self.parameters[1:] if without_self else self.parameters:
            name, has_default, default = text.partition("=")
            if text == "/":
                found = [parameter.replace(kind=Parameter.POSITIONAL_ONLY) for parameter in found]
            elif text.startswith("**"):
                found.append(Parameter(text[2:], Parameter.VAR_KEYWORD))
            elif text.startswith("*"):
                keyword_only = True
                found += [Parameter(text[1:], Parameter.VAR_POSITIONAL)] if text != "*" else []
            else:
                kind = Parameter.KEYWORD_ONLY if keyword_only else Parameter.POSITIONAL_OR_KEYWORD
                found.append(Parameter(name, kind, default=_Source(default) if has_default else Parameter.empty))
        return Signature(found)


class _Source(str):
    __repr__ = str.__str__


Table = Mapping[str, Entry]
"""By name in full, `package.module.Class.method`."""


def scan(src: Path) -> tuple[str, dict[str, Entry]]:
    """Version and public names of a source tree."""
    text = (src / PACKAGE / "_version.py").read_text(encoding="utf-8")
    version = re.findall(r'__version__ = "([^"+]+)', text)[0]
    table: dict[str, Entry] = {}
    for module in MODULES:
        path = src.joinpath(*module.split("."))
        is_package = path.is_dir()
        file = path / "__init__.py" if is_package else path.with_suffix(".py")
        if file.is_file():
            scope = _Scope(module, is_package)
            table[module] = Entry("module")
            table.update(scope.entries(ast.parse(file.read_text(encoding="utf-8")).body))
    return version, table


class _Scope:
    """Names of one module."""

    def __init__(self, module: str, is_package: bool) -> None:
        self._module, self._package = module, module if is_package else module.rpartition(".")[0]
        self._imported: dict[str, str] = {}

    def entries(self, body: Sequence[ast.stmt]) -> Iterator[tuple[str, Entry]]:
        """Definitions of the statements, also under `if` and `try`."""
        for node in body:
            match node:
                case ast.If() | ast.Try():
                    yield from self.entries([*node.body, *node.orelse])
                case ast.ImportFrom():
                    yield from self._aliases(node)
                case ast.FunctionDef() if _is_public(node.name):
                    yield f"{self._module}.{node.name}", Entry("function", _parameters(node.args))
                case ast.ClassDef() if _is_public(node.name):
                    yield from self._class(node)
                case ast.Assign() | ast.AnnAssign():
                    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                        if isinstance(target, ast.Name) and _is_public(target.id):
                            yield f"{self._module}.{target.id}", Entry("value")

    def _aliases(self, node: ast.ImportFrom) -> Iterator[tuple[str, Entry]]:
        parts = self._package.split(".")
        above = parts[: len(parts) - node.level + 1] if node.level else []
        source = ".".join([*above, *([node.module] if node.module else [])])
        for alias in node.names if source.split(".")[0] == PACKAGE else []:
            name = alias.asname or alias.name
            self._imported[name] = f"{source}.{alias.name}"
            if _is_public(name):
                yield f"{self._module}.{name}", Entry("alias", target=f"{source}.{alias.name}")

    def _class(self, node: ast.ClassDef) -> Iterator[tuple[str, Entry]]:
        name = f"{self._module}.{node.name}"
        self._imported[node.name] = name
        bases = [ast.unparse(base) for base in node.bases]
        yield name, Entry("class", bases=[self._imported.get(base, base) for base in bases])
        for member in node.body:
            if isinstance(member, ast.FunctionDef) and (_is_public(member.name) or member.name == "__init__"):
                is_static = any(ast.unparse(d) == "staticmethod" for d in member.decorator_list)
                kind = "static" if is_static else "method"
                yield f"{name}.{member.name}", Entry(kind, _parameters(member.args))


def _is_public(name: str) -> bool:
    return not name.startswith("_")


def _parameters(args: ast.arguments) -> list[str]:
    positional = [arg.arg for arg in (*args.posonlyargs, *args.args)]
    first_default = len(positional) - len(args.defaults)
    for index, default in enumerate(args.defaults, start=first_default):
        positional[index] += f"={ast.unparse(default)}"
    if args.posonlyargs:
        positional.insert(len(args.posonlyargs), "/")
    keyword_only = [
        arg.arg if default is None else f"{arg.arg}={ast.unparse(default)}"
        for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    rest = [f"*{args.vararg.arg}"] if args.vararg else ["*"] if keyword_only else []
    options = [f"**{args.kwarg.arg}"] if args.kwarg else []
    return [*positional, *rest, *keyword_only, *options]


def dump(tables: Mapping[str, Table]) -> str:
    """The file's text: each name's meanings, and the releases that have each; all of them, if none is said."""
    names: dict[str, list[dict[str, Any]]] = {}
    for version, table in sorted(tables.items()):
        for name, entry in table.items():
            short = {key: value for key, value in asdict(entry).items() if value}
            meanings = names.setdefault(name, [])
            same = next((m for m in meanings if {**m, "in": None} == {"in": None, **short}), None)
            if same:
                same["in"].append(version)
            else:
                meanings.append({"in": [version], **short})
    for meaning in (m for meanings in names.values() for m in meanings):
        if len(meaning["in"]) == len(tables):
            del meaning["in"]
    lines = [f"    {json.dumps(name)}: {json.dumps(meanings)}" for name, meanings in sorted(names.items())]
    head = json.dumps({"repository": REPOSITORY, "commits": COMMITS}, indent=2).replace("\n", "\n  ")
    return f'{{\n  "source": {head},\n  "names": {{\n' + ",\n".join(lines) + "\n  }\n}\n"


@cache
def recorded() -> dict[str, dict[str, Entry]]:
    """The recorded tables, by release."""
    tables: dict[str, dict[str, Entry]] = {version: {} for version in COMMITS}
    for name, meanings in json.loads(FILE.read_text(encoding="utf-8"))["names"].items():
        for meaning in meanings:
            for version in meaning.pop("in", tables):
                tables[version][name] = Entry(**meaning)
    return tables


def main(sources: Sequence[str]) -> None:
    """Run the command."""
    tables = dict(scan(Path(src)) for src in sources)
    assert tables.keys() == COMMITS.keys(), f"{sorted(tables)} are not the releases {sorted(COMMITS)}"
    FILE.write_text(dump(tables), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
