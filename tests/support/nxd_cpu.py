"""The real NeuronX Distributed on CPU, with stand-ins for what it imports of AWS's and no machine here has.

`bash scripts/test.sh nxd --source DIR` runs the tests marked `nxd`: in an environment that has what NxD imports beside
torch-xla (tenacity, boto3, transformers==4.51.*), with the `src` of a checkout on PYTHONPATH.

Its own switch NXD_CPU_MODE=1 sends collectives to gloo; none of its code is replaced. The stand-ins answer every import
below torch_neuronx, libneuronxla, neuronxcc, nki and nkilib. Three names do something: the platform, the ring of ranks,
and decorators, which change nothing. To call any other raises.
"""

from __future__ import annotations

import ast
import atexit
import json
import os
import re
import shutil
import sys
import tempfile
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

from nxtrain.backends.neuron.sdk import installed
from tests.support import leave_metadata

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
    """

    kind: str
    parameters: list[str] = field(default_factory=list)
    bases: list[str] = field(default_factory=list)
    target: str = ""

    def signature(self, *, without_self: bool = False) -> Signature:
        """The parameters as `inspect` has them; a default is its source."""
        results: list[Parameter] = []
        keyword_only = False
        for text in self.parameters[1:] if without_self else self.parameters:
            name, has_default, default = text.partition("=")
            if text == "/":
                results = [parameter.replace(kind=Parameter.POSITIONAL_ONLY) for parameter in results]
            elif text.startswith("**"):
                results.append(Parameter(text[2:], Parameter.VAR_KEYWORD))
            elif text.startswith("*"):
                keyword_only = True
                results += [Parameter(text[1:], Parameter.VAR_POSITIONAL)] if text != "*" else []
            else:
                kind = Parameter.KEYWORD_ONLY if keyword_only else Parameter.POSITIONAL_OR_KEYWORD
                results.append(Parameter(name, kind, default=_Source(default) if has_default else Parameter.empty))
        return Signature(results)


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


ROOTS = ("torch_neuronx", "libneuronxla", "neuronxcc", "nki", "nkilib")
PLATFORM = "NXD_TEST_PLATFORM"
"""Variable with the platform that NxD believes in; trn2 if it is not set."""

_DECORATORS = {"jit", "nki_jit", "hlo_debug", "skip_middle_end_transformations"}


def prepare(cpu_mode: bool = True) -> None:
    """Make NxD importable in this process, and known to importlib.metadata as if pip had installed it."""
    os.environ["NXD_CPU_MODE"] = str(int(cpu_mode))
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    os.environ.setdefault("NXD_LOG_LEVEL", "warning")
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())  # last: a true package wins
    if installed("neuronx-distributed"):
        return
    result = find_spec("neuronx_distributed")
    assert result is not None and result.origin is not None
    version: dict[str, str] = {}
    exec((Path(result.origin).parent / "_version.py").read_text(encoding="utf-8"), version)
    site = Path(tempfile.mkdtemp(prefix="nxd-metadata-"))
    atexit.register(shutil.rmtree, site, ignore_errors=True)
    leave_metadata(site, "neuronx-distributed", version["__version__"])
    sys.path.append(str(site))


class CollectivesConfig:
    """Neighbours of each rank around the ring of every replica group, which NxD requests from neuronxcc."""

    def __init__(self, replica_groups: Sequence[Sequence[int]]) -> None:
        self.rank_src_tgt_pairs = {
            rank: list(zip(group, [*group[1:], group[0]], strict=True)) for group in replica_groups for rank in group
        }


def get_platform_target() -> str:
    """Name of the chip."""
    return os.environ.get(PLATFORM, "trn2")


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        root = fullname.partition(".")[0]
        # torch-xla looks for libneuronxla to learn whether it is on Trainium; until then there is none.
        hidden = root == "libneuronxla" and not hasattr(sys.modules.get("torch_xla"), "_found_libneuronxla")
        return ModuleSpec(fullname, _Loader(), is_package=True) if root in ROOTS and not hidden else None


class _Loader(Loader):
    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "torch_neuronx":
            import torch

            vars(torch.classes)["neuron"] = _Module("torch.classes.neuron")  # named in annotations


class _Module(types.ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        true = {"get_platform_target": get_platform_target, "CollectivesConfig": CollectivesConfig}
        value = true.get(name) or _placeholder(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Placeholder(type):
    """Type of the names that mean nothing: classes, so that annotations, subclasses and `isinstance` accept them."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _placeholder(f"{cls.__module__}.{cls.__name__}.{name}")

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls.__name__ in _DECORATORS:
            return args[0] if args and callable(args[0]) else lambda function: function
        if cls.__name__[:1].isupper():  # made at import, as a default value
            return type.__call__(cls)
        raise NotImplementedError(f"{cls.__module__}.{cls.__name__} is a stand-in")


def _placeholder(name: str) -> Any:
    module, _, leaf = name.rpartition(".")
    return _Placeholder(leaf, (), {"__module__": module})
