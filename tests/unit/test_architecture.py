"""The rules of the architecture that ruff, mypy and import-linter cannot say."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

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
    """True if a statement or call changes this process's environment variables."""
    if isinstance(node, ast.Subscript):
        return isinstance(node.ctx, ast.Store | ast.Del) and ast.unparse(node.value).endswith("environ")
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        owner, method = ast.unparse(node.func.value), node.func.attr
        if owner.endswith("environ"):
            return method in {"update", "setdefault", "pop", "popitem", "clear"}
        return owner == "os" and method in {"putenv", "unsetenv"}
    return False


def says_cuda(node: ast.AST) -> bool:
    """True if code names the device: `x.cuda`, `"cuda"`, `"cuda:0"`. Prose may."""
    if isinstance(node, ast.Attribute):
        return node.attr == "cuda"
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.split(":")[0] == "cuda"


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
        "tools.compile.commands",
        "tools.compile.precompile",
        "config.load",
        "config.check",
        "data.arrow.inspection",
        "data.arrow.preparation",
        "tools.doctor.examine",
        "common.family",
        "tools.trace.command",
        "launch.local",
        "launch.targets.render",
        "common.mesh",
        "plan.goodput",
        "plan.timeline",
        "common.sharding",
    ],
)
def test_what_needs_no_torch_starts_without_it(module: str) -> None:
    code = f"import sys, nxtrain.{module}; sys.exit('torch was imported' if 'torch' in sys.modules else 0)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr


def _imported(path: Path, modules: Mapping[str, Path]) -> set[str]:
    """Modules of nxtrain that a file imports when it is loaded, or for its types."""
    results = set()
    top = ast.parse(path.read_text(encoding="utf-8")).body
    for node in [*top, *(statement for block in top if isinstance(block, ast.If) for statement in block.body)]:
        if isinstance(node, ast.ImportFrom) and node.module:
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            results |= {name if name in modules else node.module for name in names}
    return results & modules.keys()


def circles(imports: Mapping[str, set[str]]) -> list[str]:
    """Modules that reach themselves: what is left when modules without imports are taken away again and again."""
    left = {module: set(others) for module, others in imports.items()}
    while free := {module for module, others in left.items() if not others & left.keys()}:
        left = {module: others for module, others in left.items() if module not in free}
    return sorted(left)


def test_no_modules_import_each_other_not_even_for_types() -> None:
    paths = (ROOT / "nxtrain").rglob("*.py")
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    assert not circles({name: _imported(path, modules) - {name} for name, path in modules.items()})


MAX_CODE_LINES = 60
MAX_ARGUMENTS = 7

COMMANDS = "nxtrain/cli"
"""Typer commands, whose arguments are the options."""


def functions(source: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef, source: str) -> int:
    """Lines of a function that are neither blank, comment nor docstring."""
    numbers = set(range(function.lineno, (function.end_lineno or 0) + 1))
    if ast.get_docstring(function) is not None:
        docstring = function.body[0]
        numbers -= set(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    lines = source.splitlines()
    return sum(bool(line := lines[number - 1].strip()) and not line.startswith("#") for number in numbers)


def num_arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    taken = function.args
    every = [*taken.posonlyargs, *taken.args, *taken.kwonlyargs, taken.vararg, taken.kwarg]
    return sum(argument is not None and argument.arg not in {"self", "cls"} for argument in every)


def has_reason(function: ast.FunctionDef | ast.AsyncFunctionDef, source: str) -> bool:
    """True if the line of a function, or the line above, has a comment such as `# 9 arguments: as the kernel's`."""
    lines = source.splitlines()
    near = lines[max(0, function.lineno - 2) : function.lineno]
    return any(re.search(rf"# {num_arguments(function)} arguments: \w+", line) for line in near)


def too_large(source: str) -> list[str]:
    """Functions over the limits, with the excess."""
    results = []
    for function in functions(source):
        if (count := code_lines(function, source)) > MAX_CODE_LINES:
            results.append(f"{function.name}: {count} lines")
        if (count := num_arguments(function)) > MAX_ARGUMENTS and not has_reason(function, source):
            results.append(f"{function.name}: {count} arguments")
    return results


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def f(a, b, c, d, e, f, g): pass", []),
        ("def f(self, a, b, c, d, e, f, g): pass", []),
        ("def f(a, b, c, d, e, f, g, h): pass", ["f: 8 arguments"]),
        ("def f(a, /, b, c, *d, e, f, g, **h): pass", ["f: 8 arguments"]),
        ("class A:\n    def __init__(\n        self, a, b, c, d,\n e, f, g, h): pass", ["__init__: 8 arguments"]),
        ("def f(a, b, c, d, e, f, g, h):  # 8 arguments: a kernel's\n    pass", []),
        ("# 8 arguments: a kernel's\ndef f(a, b, c, d, e, f, g, h): pass", []),
        ("# 9 arguments: a kernel's\ndef f(a, b, c, d, e, f, g, h): pass", ["f: 8 arguments"]),
        ("def f(a, b, c, d, e, f, g, h):  # 8 arguments:\n    pass", ["f: 8 arguments"]),
        ("def f():\n" + "    pass\n" * 59, []),
        ("def f():\n" + "    pass\n" * 60, ["f: 61 lines"]),
        ("def f():\n    'One.\\\n" + "more\\\n" * 9 + "    '\n" + "    pass\n\n    # why\n" * 59, []),
        ("async def f():\n" + "    pass\n" * 60, ["f: 61 lines"]),
    ],
)
def test_a_function_over_the_limits_is_seen(code: str, expected: list[str]) -> None:
    assert too_large(code) == expected


MOST_NAMES = 2  # in one assignment
COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


def dense(source: str) -> list[str]:
    """Lines with statements of more than one idea, and the rule of CONTRIBUTING.md against each."""
    results = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.NamedExpr):
            results.append(f"{node.lineno}: no :=")
        elif isinstance(node, COMPREHENSIONS):
            inside = [part for part in ast.walk(node) if isinstance(part, COMPREHENSIONS)]
            if len(node.generators) > 1 or len(inside) > 1:
                results.append(f"{node.lineno}: no comprehension within another")
        elif isinstance(node, ast.stmt) and not hasattr(node, "body"):
            choices = [part for part in ast.walk(node) if isinstance(part, ast.IfExp)]
            if len(choices) > 1:
                results.append(f"{node.lineno}: one conditional expression at most")
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
                names = getattr(node.targets[0], "elts", ())
                if len(names) > MOST_NAMES:
                    results.append(f"{node.lineno}: two names at most")
    return results


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("a, b = 1, 2\na, b, c = f()\nd = [x for x in [*a] if b]\ne = a if b else c", []),
        ("if a := f():\n    pass", ["1: no :="]),
        ("a, b, c = 1, 2, 3", ["1: two names at most"]),
        ("a = [x for y in b for x in y]", ["1: no comprehension within another"]),
        ("a = {x: [*(z for z in y)] for x, y in b}", ["1: no comprehension within another"]),
        ("f(a if b else c, d if e else g)", ["1: one conditional expression at most"]),
    ],
)
def test_a_statement_of_several_ideas_is_seen(code: str, expected: list[str]) -> None:
    assert dense(code) == expected


def test_statements_have_one_idea() -> None:
    results = {name(path): dense(path.read_text(encoding="utf-8")) for path in LIBRARY}
    assert {path: lines for path, lines in results.items() if lines} == {}


def test_functions_are_short_and_take_few_arguments_or_give_a_reason() -> None:
    paths = [path for path in LIBRARY if not inside(path, COMMANDS)]
    sources = {name(path): path.read_text(encoding="utf-8") for path in paths}
    assert {path: result for path, source in sources.items() if (result := too_large(source))} == {}


def test_no_class_name_is_used_twice() -> None:
    names = Counter[str]()
    for path in LIBRARY:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                names[node.name] += 1
    assert [name for name, number in names.items() if number > 1] == []
