"""Limits of the numbers, texts and tables that any configuration may hold, whatever its keys mean."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from nxtrain.errors import ConfigError

MAX_INT = 2**63 - 1
"""Largest integer of TOML, and of a tensor."""

MAX_SIZE = 2**31 - 1
"""Largest size of one dimension, batch or buffer."""

MAX_RANKS = 2**20
"""Most ranks of a world, and the largest degree."""

MAX_DEPTH = 16
"""Tables and lists inside one another; the schema needs four."""

SHOWN_CHARS = 80
"""Characters of a value that a message repeats."""

_PRINTED_BITS = 4096
"""Longest integer that is printed; Python refuses to print one of more than 4300 digits."""


def faults(table: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Every value outside the limits: its dotted key, and the reason."""
    waiting: list[tuple[str, Any, int]] = [("", table, 0)]
    while waiting:
        key, value, depth = waiting.pop()
        if isinstance(value, Mapping | list | tuple):
            if depth > MAX_DEPTH:
                yield key, f"tables and lists lie more than {MAX_DEPTH} deep inside one another"
            elif isinstance(value, Mapping):
                yield from ((key, f"the key {quoted(name)} {reason}") for name in value if (reason := _bad_text(name)))
                waiting += [(f"{key}.{name}" if key else f"{name}", inner, depth + 1) for name, inner in value.items()]
            else:
                waiting += [(key, inner, depth + 1) for inner in value]
        elif isinstance(value, str):
            if reason := _bad_text(value):
                yield key, f"{quoted(value)} {reason}"
        elif isinstance(value, int) and not -MAX_INT - 1 <= value <= MAX_INT:
            yield key, f"{integer(value)} is no integer of 64 bits: -{MAX_INT + 1} to {MAX_INT}"


def finite(value: float | None) -> float | None:
    """Hold an option of a command to be a number, which no bound does.

    Raises:
        ConfigError: It is `nan`.
    """
    if value is not None and math.isnan(value):
        raise ConfigError("an option is nan; give a number")
    return value


def shortened(text: str) -> str:
    """A text as messages repeat it."""
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}... ({len(text):,} characters)"


def quoted(text: str) -> str:
    """A text with its unprintable characters escaped, as messages repeat it."""
    return shortened(ascii(text) if _bad_text(text) else repr(text))


def integer(value: int) -> str:
    """An integer as messages repeat it, of whatever length."""
    if value.bit_length() > _PRINTED_BITS:
        return f"an integer of about {int(value.bit_length() * math.log10(2)) + 1:,} digits"
    return shortened(str(value))


def _bad_text(text: str) -> str:
    if "\0" in text:
        return "holds a NUL character, which no path or name may"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "is not UTF-8 text"
    return ""
