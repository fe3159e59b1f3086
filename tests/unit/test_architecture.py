"""The rules of the architecture that ruff, mypy and import-linter cannot say."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
LIBRARY = sorted(path for folder in ("nxtrain", "models") for path in (ROOT / folder).rglob("*.py"))
TEXTS = sorted(
    path
    for folder in ("nxtrain", "models", "tests", "scripts", "configs")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".py", ".sh", ".toml", ".md"}
)
MAX_LINES = 450


def inside(path: Path, *folders: str) -> bool:
    return any(path.is_relative_to(ROOT / folder) for folder in folders)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def expressions(path: Path) -> Iterator[ast.expr]:
    return (node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.expr))


def writes_environment(node: ast.AST) -> bool:
    """Whether a statement or call changes this process's environment variables."""
    if isinstance(node, ast.Subscript):
        return isinstance(node.ctx, ast.Store | ast.Del) and ast.unparse(node.value).endswith("environ")
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        owner, method = ast.unparse(node.func.value), node.func.attr
        if owner.endswith("environ"):
            return method in {"update", "setdefault", "pop", "popitem", "clear"}
        return owner == "os" and method in {"putenv", "unsetenv"}
    return False


def says_cuda(node: ast.AST) -> bool:
    """Whether code names the device: `x.cuda`, `"cuda"`, `"cuda:0"`. Prose may."""
    if isinstance(node, ast.Attribute):
        return node.attr == "cuda"
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.split(":")[0] == "cuda"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("os.environ['A'] = '1'", True),
        ("del environ['A']", True),
        ("os.environ['A'] += '1'", True),
        ("os.environ.setdefault('A', '1')", True),
        ("os.putenv('A', '1')", True),
        ("a = os.environ['A']", False),
        ("env = {**os.environ, 'A': '1'}", False),
        ("os.environ.get('A')", False),
    ],
)
def test_an_environment_write_is_seen_in_every_form(code: str, expected: bool) -> None:
    assert any(map(writes_environment, ast.walk(ast.parse(code)))) is expected


@pytest.mark.parametrize(
    ("code", "expected"),
    [("torch.cuda.empty_cache()", True), ("x.to('cuda:1')", True), ("f(d='cuda')", True), ("'no cuda here'", False)],
)
def test_a_device_name_is_seen_in_every_form(code: str, expected: bool) -> None:
    assert any(map(says_cuda, ast.walk(ast.parse(code)))) is expected


def test_nothing_writes_environment_variables_and_processes_get_theirs_when_they_start() -> None:
    assert [f"{name(p)}:{n.lineno}" for p in LIBRARY for n in expressions(p) if writes_environment(n)] == []


def test_only_backends_and_the_configuration_choices_name_a_device() -> None:
    paths = [path for path in LIBRARY if not inside(path, "nxtrain/backends", "nxtrain/config")]
    assert [f"{name(p)}:{n.lineno}" for p in paths for n in expressions(p) if says_cuda(n)] == []


def test_no_file_is_longer_than_a_reader_can_hold() -> None:
    lines = {name(path): path.read_text(encoding="utf-8").count("\n") for path in TEXTS if path.suffix == ".py"}
    assert {path: count for path, count in lines.items() if count > MAX_LINES} == {}


def test_every_text_is_ascii() -> None:
    assert [name(path) for path in TEXTS if not path.read_bytes().isascii()] == []


def test_every_package_is_shipped_under_its_import_name() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folder_of = setuptools["package-dir"]
    shipped = set()
    for package in setuptools["packages"]:
        top, *rest = package.split(".")
        shipped.add("/".join([folder_of[top], *rest]))
    assert shipped == {name(path.parent) for path in LIBRARY if path.name == "__init__.py"}


def test_every_folder_of_modules_is_a_package() -> None:
    assert {name(path.parent) for path in LIBRARY if not (path.parent / "__init__.py").exists()} == set()


@pytest.mark.parametrize(
    "module",
    [
        "cli",
        "compile.commands",
        "config.load",
        "config.check",
        "family",
        "launch.local",
        "mesh",
        "plan.goodput",
        "plan.timeline",
        "sharding",
    ],
)
def test_what_needs_no_torch_starts_without_it(module: str) -> None:
    code = f"import sys, nxtrain.{module}; sys.exit('torch was imported' if 'torch' in sys.modules else 0)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr


def _imported(path: Path, modules: Mapping[str, Path]) -> set[str]:
    """Modules of nxtrain that a file imports when it is loaded, or for its types."""
    found = set()
    top = ast.parse(path.read_text(encoding="utf-8")).body
    for node in [*top, *(each for block in top if isinstance(block, ast.If) for each in block.body)]:
        if isinstance(node, ast.ImportFrom) and node.module:
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            found |= {name if name in modules else node.module for name in names}
    return found & modules.keys()


def circles(imports: Mapping[str, set[str]]) -> list[str]:
    """Modules that reach themselves: what is left when modules without imports are taken away again and again."""
    left = {module: set(others) for module, others in imports.items()}
    while free := {module for module, others in left.items() if not others & left.keys()}:
        left = {module: others for module, others in left.items() if module not in free}
    return sorted(left)


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]


def test_no_modules_import_each_other_not_even_for_types() -> None:
    paths = (ROOT / "nxtrain").rglob("*.py")
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    assert not circles({name: _imported(path, modules) - {name} for name, path in modules.items()})
