"""Parts of docs/ that are written from the code: configuration keys, files, import layers, releases of the Neuron SDK.

A part stands between two comments of its page, `begin: NAME` and `end: NAME`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from pydantic import BaseModel

from nxtrain.backends.neuron import torchneuron
from nxtrain.backends.neuron.sdk import RELEASES, install_command
from nxtrain.config.schema import RunConfig
from nxtrain.config.show import keys

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def key_tables() -> str:
    """Markdown tables of every configuration key, one for each section."""
    lines = list[str]()
    for name, field in RunConfig.model_fields.items():
        section = field.annotation
        assert isinstance(section, type)
        assert issubclass(section, BaseModel)
        title = (section.__doc__ or "").partition("\n")[0].partition(": ")[2]
        lines += ["", f"### [{name}]", "", title[:1].upper() + title[1:], "", "| key | type | default | meaning |"]
        lines.append("|---|---|---|---|")
        for key in keys():
            if key.name.partition(".")[0] == name:
                kind = ", ".join(f"`{choice}`" for choice in key.kind.split(" | ")) if " | " in key.kind else key.kind
                lines.append(f"| `{key.name}` | {kind} | {_cell(_code(key.default))} | {_cell(key.doc)} |")
    return "\n".join([*lines, ""])


@cache
def file_list() -> str:
    """Markdown list of every module of nxtrain and of the model families, by folder."""
    lines = list[str]()
    for folder in _folders():
        package = (folder / "__init__.py").read_text(encoding="utf-8")
        lines += ["", f"### {folder.relative_to(ROOT)}/", ""]
        if sentence := _sentence(package):
            lines += [sentence, ""]
        rows = [
            (path.name, _sentence(path.read_text(encoding="utf-8")))
            for path in sorted(folder.glob("*.py"))
            if path.name != "__init__.py"
        ]
        if rows:
            lines += ["| file | content |", "|---|---|"]
        lines += [f"| `{name}` | {_cell(sentence)} |" for name, sentence in rows]
    return "\n".join([*lines, ""])


def layers() -> str:
    """Block of the layers of imports, from the contract of import-linter."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    (found,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    return "\n".join(["```text", *found, "```", ""])


def releases() -> str:
    """Table of the packages of each release of the Neuron SDK, with the command that installs them."""
    lines = ["", "| SDK | torch | torch-neuronx | neuronx-cc | NxD |", "|---|---|---|---|---|"]
    lines += [
        f"| {sdk} | 2.9.0 | 2.9.0.{found.torch_neuronx} | {found.neuronx_cc} | {found.neuronx_distributed} |"
        for sdk, found in RELEASES.items()
    ]
    lines += ["", "```text", install_command().partition(": ")[2], "```", ""]
    return "\n".join(
        [*lines, "For TorchNeuron:", "", "```text", torchneuron.install_command().partition(": ")[2], "```", ""]
    )


PARTS: dict[tuple[str, str], Callable[[], str]] = {
    ("configuration.md", "keys"): key_tables,
    ("architecture.md", "layers"): layers,
    ("architecture.md", "files"): file_list,
    ("trainium.md", "releases"): releases,
}


def replaced(text: str, name: str, part: str) -> str:
    """A page with one generated part replaced."""
    pattern = rf"(<!-- begin: {name};[^\n]*-->\n).*?(<!-- end: {name} -->)"
    new, number = re.subn(pattern, lambda found: found[1] + part + found[2], text, flags=re.DOTALL)
    assert number == 1, f"the page has no place for {name}"
    return new


def pages() -> Iterator[tuple[Path, str, str]]:
    """Path of each page with generated parts, its text, and the text that the code asks for."""
    for file in dict.fromkeys(file for file, _ in PARTS):
        text = wanted = (DOCS / file).read_text(encoding="utf-8")
        for (of, name), write in PARTS.items():
            wanted = replaced(wanted, name, write()) if of == file else wanted
        yield DOCS / file, text, wanted


def _folders() -> Iterator[Path]:
    for top in ("nxtrain", "models"):
        yield from sorted(path.parent for path in (ROOT / top).rglob("__init__.py"))


def _sentence(source: str) -> str:
    """First paragraph of a module's docstring, as one line."""
    return " ".join((ast.get_docstring(ast.parse(source)) or "").partition("\n\n")[0].split())


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _code(text: str) -> str:
    return f"`{text}`" if text else ""
