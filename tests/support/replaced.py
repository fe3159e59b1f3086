"""Differences between loaded modules and their files: functions, methods, defaults and constants that were replaced."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

_BESIDE = "-anew"
"""Ending of the names of modules that are executed a second time."""


def replaced(package: str) -> list[str]:
    """Names that differ between the loaded modules of a package and their files, executed anew beside them."""
    loaded = {name: module for name, module in sys.modules.items() if name == package or name.startswith(f"{package}.")}
    return sorted(
        f"{name}.{at}"
        for name, module in loaded.items()
        for at in _differences(vars(module), vars(_anew(name, module)))
    )


def _anew(name: str, module: ModuleType) -> ModuleType:
    assert module.__file__ is not None, name
    alias = f"{name}{_BESIDE}"
    spec = importlib.util.spec_from_file_location(alias, module.__file__)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[alias] = made  # where dataclasses look
    try:
        spec.loader.exec_module(made)
    finally:
        del sys.modules[alias]
    return made


def _differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> Iterator[str]:
    """Names whose values are others in one namespace than in another, or that one lacks; as dotted paths."""
    for name in sorted({*here, *there}):
        known = [names[name] for names in (here, there) if name in names]
        if name.startswith("__") and not any(isinstance(value, FunctionType) for value in known):
            continue
        if len(known) == 2:
            yield from (f"{name}{rest}" for rest in _unlike(*known))
        elif not isinstance(known[0], ModuleType):  # that became a package's when it was imported
            yield name


def _unlike(a: Any, b: Any) -> Iterator[str]:
    if a is b:
        return
    if inspect.isclass(a) and inspect.isclass(b) and f"{a.__module__}{_BESIDE}" == b.__module__:
        if _ancestors(a) != _ancestors(b):
            yield ""
        yield from (f".{name}" for name in _differences(vars(a), vars(b)))
    elif _codes(a) != _codes(b) or (not _codes(a) and _text(a) != _text(b)):
        yield ""


def _ancestors(of: type) -> list[str]:
    return [f"{each.__module__.removesuffix(_BESIDE)}.{each.__qualname__}" for each in of.__mro__]


def _codes(value: Any) -> list[tuple[CodeType, list[str]]]:
    """Code and defaults of whatever is called under a name."""
    if isinstance(value, property):
        return [code for part in (value.fget, value.fset) if part for code in _codes(part)]
    if isinstance(value, staticmethod | classmethod):
        return _codes(value.__func__)
    if isinstance(value, functools.cached_property):
        return _codes(value.func)
    if not isinstance(value, FunctionType):
        return []
    inner = _codes(value.__wrapped__) if hasattr(value, "__wrapped__") else []
    defaults = [*(value.__defaults__ or ()), *sorted((value.__kwdefaults__ or {}).items())]
    return [(value.__code__, [_text(default) for default in defaults]), *inner]


def _text(value: Any) -> str:
    """A constant's text, without the addresses of what has no other, and without the name of its module."""
    text = repr(value).replace(_BESIDE, "")
    return type(value).__qualname__ if " at 0x" in text else text
