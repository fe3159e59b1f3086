"""YAML writer whose output all parsers read alike: a string that any parser could read as another type is quoted.

PyYAML follows YAML 1.1. The Go parsers of Kubernetes and eksctl also accept numbers of YAML 1.2, such as `1e3` and
`0o7`, and the booleans `y` and `n`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml

_STRING = "tag:yaml.org,2002:str"
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9._/-]+")


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """YAML dumper without anchors and aliases, which few people know."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _string(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    is_plain = _PLAIN.fullmatch(text) and dumper.resolve(yaml.ScalarNode, text, (True, False)) == _STRING
    style: str | None = '"'
    if text.count("\n") > 1:
        style = "|"
    elif is_plain:
        style = None
    return dumper.represent_scalar(_STRING, text, style=style)


_Dumper.add_representer(str, _string)


def dump_yaml(documents: Sequence[Any], comment: str = "") -> str:
    """Format documents as ASCII YAML text, after a comment."""
    head = "".join(f"# {line}".rstrip() + "\n" for line in comment.splitlines())
    options: dict[str, Any] = {"sort_keys": False, "width": 4096, "allow_unicode": False}
    text: str = yaml.dump_all(documents, Dumper=_Dumper, **options)
    return head + text
