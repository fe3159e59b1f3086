"""Comparing the tensors that a model needs with those that are there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_SHOWN = 10


def mismatches(wanted: Mapping[str, object], found: Mapping[str, object]) -> list[str]:
    """Say how two lists of tensors differ, one line for each way; empty if they do not.

    Args:
        wanted: What the model needs, by name: a shape, or a shape and a type.
        found: What is there.
    """
    missing = [name for name in wanted if name not in found]
    extra = [name for name in found if name not in wanted]
    wrong = [
        f"{name} is {found[name]} instead of {what}"
        for name, what in wanted.items()
        if name in found and found[name] != what
    ]
    lines = {"missing": missing, "unknown to the model": extra, "different": wrong}
    return [f"{len(names)} {title}: {_some(names)}" for title, names in lines.items() if names]


def _some(names: Sequence[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
