"""Limits of numbers, texts and nesting in any configuration, independent of the keys."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

MAX_INT = 2**63 - 1
"""Largest integer that TOML and tensors can represent."""

MAX_SIZE = 2**31 - 1
"""Largest size of one dimension, batch or buffer."""

MAX_RANKS = 2**20
"""Maximum number of ranks of a run, and of any parallel degree."""

MAX_DEPTH = 16
"""Maximum nesting depth of tables and lists; the schema needs four levels."""

MAX_PERIOD = 100_000
"""Maximum number of rows after which a data mixture repeats its order of corpora. Every rank stores this order."""

SHOWN_CHARS = 80
"""Maximum number of characters of a value in a message."""

_PRINTED_BITS = 4096
"""Maximum number of bits of an integer that is printed; Python refuses to print more than 4300 digits."""


def faults(table: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the dotted key and the reason of every value outside the limits."""
    waiting: list[tuple[str, Any, int]] = [("", table, 0)]
    while waiting:
        key, value, depth = waiting.pop()
        if isinstance(value, Mapping | list | tuple):
            if depth > MAX_DEPTH:
                yield key, f"tables and lists are nested more than {MAX_DEPTH} deep"
            elif isinstance(value, Mapping):
                prefix = f"{key}." if key else ""
                for name, inner in value.items():
                    if _bad_text(name):
                        yield key, f"the key {quoted(name)} {_bad_text(name)}"
                    waiting.append((f"{prefix}{name}", inner, depth + 1))
            else:
                waiting += [(key, inner, depth + 1) for inner in value]
        elif isinstance(value, str):
            if _bad_text(value):
                yield key, f"{quoted(value)} {_bad_text(value)}"
        elif isinstance(value, int) and not -MAX_INT - 1 <= value <= MAX_INT:
            yield key, f"{integer(value)} is not an integer of 64 bits: -{MAX_INT + 1} to {MAX_INT}"


def row_shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Smallest integers in the ratio of some weights, taken as decimal numbers: 0.7 and 0.3 give 7 and 3."""
    exact = [Fraction(repr(weight)) for weight in weights]
    common = math.lcm(*(weight.denominator for weight in exact))
    integers = [int(weight * common) for weight in exact]
    divisor = math.gcd(*integers)
    return tuple(size // divisor for size in integers)


def shortened(text: str) -> str:
    """Shorten a text to `SHOWN_CHARS` characters for messages."""
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}... ({len(text):,} characters)"


def quoted(text: str) -> str:
    """Quote and shorten a text for messages; unprintable characters are escaped."""
    return shortened(ascii(text) if _bad_text(text) else repr(text))


def integer(value: int) -> str:
    """Format an integer of any length for messages, shortened if necessary."""
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
