"""Parser of a graph's HLO text: its collectives, the factors of their results, and use of float64."""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass, replace
from functools import lru_cache

OPS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

Groups = tuple[tuple[int, ...], ...]  # ranks of each replica group; empty: all ranks form one group

# Source: https://openxla.org/xla/operation_semantics and the text that torch-xla 2.9 prints.
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%(\S+) = (\(.*?\)|\S+) ([a-z][a-z-]*)\((.*)")
_OPERAND = re.compile(r"(?<!=)%([\w.-]+)")  # after "=" stands a computation, as in to_apply=%Add
_SHAPE = re.compile(r"([a-z]+[0-9]*[a-z0-9]*)\[([0-9,]*)\]")
_GROUPS = re.compile(r", (?:replica_groups|source_target_pairs)=\{((?:\{[0-9,]*\},?)*)\}")
_NUMBER = re.compile(r"(-?[0-9.]+(?:e[-+]?[0-9]+)?)\)")
_TYPE_BYTES = {"pred": 1, "bf16": 2, "token": 0}


@dataclass(frozen=True)
class Collective:
    """Collective operation of an HLO graph."""

    op: str  # one of `OPS`
    groups: Groups  # replica groups; for a collective-permute, its pairs of source and target
    num_bytes: int  # size of the whole tensors: the larger of a rank's input and output
    scales: frozenset[float]  # constants by which the graph multiplies its results


@dataclass(frozen=True)
class HloGraph:
    """Collectives of an HLO graph, and its use of float64."""

    collectives: tuple[Collective, ...]  # collectives in the order of the text
    has_f64: bool  # True if the graph computes in float64


def parse(text: str) -> HloGraph:
    """Parse an HLO module in text form, in which each instruction follows its operands."""
    collectives: dict[str, Collective] = {}
    result_of: dict[str, str] = {}  # name of the collective whose result an instruction passes on
    constants: dict[str, float] = {}
    for line in text.splitlines():
        match = _INSTRUCTION.match(line)
        if match is None:
            continue
        name, shape, op, rest = match.groups()
        if op in OPS:
            operands = rest
            groups: Groups = ()
            groups_text = _GROUPS.search(rest)
            if groups_text is not None:
                operands = rest[: groups_text.start()]
                groups = _groups(groups_text[1])
            size = max(_num_bytes(shape), _num_bytes(operands))
            collectives[name] = Collective(op, groups, size, frozenset())
            result_of[name] = name
        elif op == "constant":
            number = _NUMBER.match(rest)
            if number and float(number[1]) != 1.0:  # torch-xla writes a sum as a product with 1
                constants[name] = _of_type(float(number[1]), shape)
        elif op in {"get-tuple-element", "broadcast", "convert", "reshape", "multiply"}:
            operands_of = _OPERAND.findall(rest)
            sources = [result_of[operand] for operand in operands_of if operand in result_of]
            factors = [constants[operand] for operand in operands_of if operand in constants]
            if op != "multiply":
                # These operations have one operand.
                if sources:
                    result_of[name] = sources[0]
                if factors:
                    constants[name] = factors[0]
            elif sources and factors:
                (source,), (factor,) = sources, factors
                collective = collectives[source]
                collectives[source] = replace(collective, scales=collective.scales | {factor})
    return HloGraph(tuple(collectives.values()), " f64[" in text or "(f64[" in text)


def _num_bytes(shapes: str) -> int:
    """Total bytes of all shapes in a text, such as `(bf16[8,64]{1,0}, f32[])`."""
    total = 0
    for kind, sizes in _SHAPE.findall(shapes):
        type_bytes = _TYPE_BYTES.get(kind)
        if type_bytes is None:
            (bits,) = re.findall(r"^[a-z]([0-9]+)", kind)  # f32, s64, f8e4m3fn
            type_bytes = max(1, int(bits) // 8)
        total += math.prod(int(size) for size in sizes.split(",") if size) * type_bytes
    return total


def _of_type(number: float, shape: str) -> float:
    """Round a number from HLO text to its type in the graph, bf16 or float32.

    HLO's text prints only as many digits as the type needs.
    """
    if not shape.startswith(("bf16", "f32")):
        return number
    (bits,) = struct.unpack("I", struct.pack("f", number))
    if shape.startswith("bf16"):
        bits = (bits + 0x8000) & 0xFFFF0000
    return float(struct.unpack("f", struct.pack("I", bits))[0])


@lru_cache(maxsize=64)  # a graph names the same few axes of thousands of ranks hundreds of times
def _groups(text: str) -> Groups:
    groups = []
    for group in re.findall(r"\{([0-9,]+)\}", text):
        groups.append(tuple(map(int, group.split(","))))
    return tuple(groups)
