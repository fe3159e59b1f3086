"""Shared memory between ranks: drawn programs of operations, defects that are seen, ends of ranks, and fallbacks."""

from __future__ import annotations

import ctypes
import os
import resource
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from nxtrain.backends import cpu
from nxtrain.backends.cpu import CpuBackend
from nxtrain.backends.cpu_native import build
from nxtrain.backends.cpu_native.build import LibraryBuildError
from nxtrain.common.distributed.collectives import RowCounts
from nxtrain.common.errors import BackendError, LostPeerError
from nxtrain.common.mesh import Axis, Mesh
from tests.support.drawn import one_in
from tests.support.ranks import RankPool

SLOT_BYTES = 1 << 20
TYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int32)
KINDS = ("sum", "max", "gather", "scatter", "bucket", "send", "all_to_all", "rows")


@dataclass(frozen=True)
class Call:
    """One operation of a program; all ranks run the same program.

    Args:
        kind: One of `KINDS`.
    """

    kind: str
    axis: str
    rows: int
    width: int
    dtype: torch.dtype
    lazy: bool
    late_rank: int


def axes(world: int, rank: int) -> dict[str, Axis]:
    """Axes of a mesh of two tensor parallel ranks, the world, and the world in another order."""
    mesh = Mesh.build(world, rank, tp=2 if world % 2 == 0 else 1)
    order = tuple(reversed(range(world)))
    return {"tp": mesh.tp, "dp": mesh.dp, "all": mesh.all, "reversed": Axis("reversed", order.index(rank), (order,))}


def program(seed: int, world: int) -> list[Call]:
    """Operations of many sizes, from none to several slots, and around the borders of slots and pieces."""
    rng, calls = Random(seed), []
    for _ in range(24):
        kind, dtype = rng.choice(KINDS), rng.choice(TYPES)
        slot = SLOT_BYTES // dtype.itemsize
        numbers = rng.choice([0, 1, 2, rng.randint(3, 5000), slot - 1, slot, slot + 1, rng.randint(slot, 5 * slot)])
        width = rng.choice([1, 1, 3])
        late = rng.randrange(world) if rng.random() < 0.2 else -1
        calls.append(
            Call(kind, rng.choice([*axes(world, 0)]), numbers // width, width, dtype, rng.random() < 0.5, late)
        )
    return calls


def given(call: Call, index: int, rank: int, size: int) -> Tensor:
    """Input of a rank: integers that add up without rounding in every type."""
    rows = call.rows * (size if call.kind in ("scatter", "all_to_all", "rows") else 1)
    generator = torch.Generator().manual_seed(1000 * index + rank)
    return torch.randint(-8, 9, (rows, call.width), generator=generator).to(call.dtype)


def block_rows(call: Call, sender: int, size: int) -> list[int]:
    """Rows of the blocks that a position of an axis sends: none, half or all of a share for each receiver."""
    return [(sender + 2 * receiver) % 3 * call.rows // 2 for receiver in range(size)]


def row_counts(call: Call, axis: Axis) -> RowCounts:
    """Rows that this rank sends and receives."""
    of_all = [block_rows(call, sender, axis.size) for sender in range(axis.size)]
    return RowCounts(tuple(of_all[axis.rank]), tuple(rows[axis.rank] for rows in of_all))


def start(comm: Any, call: Call, x: Tensor, axis: Axis) -> Any:
    """Start an operation; for a transfer, one round the ring of the axis."""
    match call.kind:
        case "sum" | "max":
            return comm.start_all_reduce(x, axis, call.kind)
        case "gather":
            return comm.start_all_gather(x, axis)
        case "scatter":
            return comm.start_reduce_scatter(x, axis)
        case "all_to_all":
            return comm.start_all_to_all(x, axis)
        case "rows":
            rows = row_counts(call, axis)
            return comm.start_all_to_all(x[: sum(rows.sent)], axis, rows)
        case "bucket":
            return comm.start_all_reduce_bucket([x, x[:2]], axis, torch.float32, scale=0.5)
        case _:
            comm.start_send(x, axis, (axis.rank + 1) % axis.size)
            return comm.start_receive(torch.empty_like(x), axis, (axis.rank - 1) % axis.size)


def play(backend: CpuBackend, seed: int, library: str = "") -> list[list[Tensor]]:
    """Run a program; the results of each call."""
    backend.choose_transport("shared_memory")
    if library:
        assert backend.collectives.share(ctypes.CDLL(library)) == ""
    mine, under_way = axes(backend.world, backend.rank), []
    for index, call in enumerate(program(seed, backend.world)):
        axis = mine[call.axis]
        if axis.size == 1:
            continue
        if call.late_rank == backend.rank:
            time.sleep(0.02)
        pending = start(backend.collectives, call, given(call, index, backend.rank, axis.size), axis)
        under_way.append((index, pending) if call.lazy else (index, pending.wait()))
    actual: dict[int, Any] = {
        index: result.wait() if hasattr(result, "wait") else result for index, result in under_way
    }
    backend.collectives.barrier()
    return [[*result] if isinstance(result, list) else [result] for _, result in sorted(actual.items())]


def rows_for(call: Call, inputs: Tensor, axis: Axis) -> Tensor:
    """Rows that a rank receives, in the order of the senders."""
    blocks = []
    for sender, sent in enumerate(inputs):
        rows = block_rows(call, sender, axis.size)
        start = sum(rows[: axis.rank])
        blocks.append(sent[start : start + rows[axis.rank]])
    return torch.cat(blocks)


def wanted(seed: int, world: int, rank: int) -> list[list[Tensor]]:
    """Results of a program, from the inputs of all ranks."""
    results = []
    for index, call in enumerate(program(seed, world)):
        axis = axes(world, rank)[call.axis]
        if axis.size == 1:
            continue
        inputs = torch.stack([given(call, index, member, axis.size) for member in axis.group_of(rank)])
        match call.kind:
            case "sum":
                results.append([inputs.sum(0, dtype=call.dtype)])
            case "max":
                results.append([inputs.amax(0)])
            case "gather":
                results.append([inputs.flatten(0, 1)])
            case "scatter":
                results.append([inputs.sum(0, dtype=call.dtype).unflatten(0, (axis.size, call.rows))[axis.rank]])
            case "all_to_all":
                results.append([inputs.unflatten(1, (axis.size, call.rows))[:, axis.rank].flatten(0, 1)])
            case "rows":
                results.append([rows_for(call, inputs, axis)])
            case "bucket":
                total = inputs.float().sum(0) * 0.5
                results.append([total, total[:2]])
            case _:
                results.append([inputs[axis.rank - 1]])
    return results


def differences(courses: list[list[list[Tensor]]], seed: int) -> list[tuple[int, int]]:
    """Ranks, and indices of the calls, whose results are wrong."""
    world = len(courses)
    return [
        (rank, index)
        for rank, actual in enumerate(courses)
        for index, (ours, right) in enumerate(zip(actual, wanted(seed, world, rank), strict=True))
        if not all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(ours, right, strict=True))
    ]


@pytest.mark.parametrize("seed", one_in(3, range(8)))
@pytest.mark.parametrize("world", [2, 3, 4])
def test_drawn_programs_give_the_sums_of_all_inputs(ranks: RankPool, world: int, seed: int) -> None:
    assert differences(ranks.run(world, play, seed), seed) == []


MUTANTS = {
    "slots are overwritten before they are read": ("header->done.load() + lane.depth <= lane.posted", "false"),
    "slots are read before they are written": ("acquire) <= lane.read", "acquire) < lane.read"),
    "sums without the last rank": ("size_t r = 0; r < pieces.size()", "size_t r = 0; r + 1 < pieces.size()"),
    "no scale": ("if (scale != 1.0)", "if (false)"),
    "the largest is the last": ("total[i] < x || x != x ? x : total[i]", "x"),
    "pieces are placed one rank too far": (
        "(op.out + (r * op.count + from)",
        "(op.out + ((r + 1) % n * op.count + from)",
    ),
    "each rank scatters the first piece": (".slot(r, lane.read) + lane.me * op.part * es", ".slot(r, lane.read)"),
    "sums before all terms": ("if (op.in_two && op.posted % 2 && op.read < op.posted) return;", ""),
    "one slot for all chunks": ("long(chunk % depth) * kSlot", "0 * kSlot"),
}
"""Defects in `exchange.cpp`: text and its replacement."""


@pytest.mark.parametrize("name", one_in(2, MUTANTS))
def test_a_defect_is_seen(ranks: RankPool, name: str, tmp_path: Path) -> None:
    text, (right, wrong) = build.SOURCE.read_text(), MUTANTS[name]
    assert right in text, f"{build.SOURCE.name} has no {right!r}"
    source, library = tmp_path / "exchange.cpp", tmp_path / "exchange.so"
    source.write_text(text.replace(right, wrong))
    build.compile_library(source, library, ("-std=c++17", "-O1", "-shared", "-fPIC"))
    assert any(differences(ranks.run(4, play, seed, str(library)), seed) for seed in range(6))


def sums(backend: CpuBackend, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A sum that rounds, and one with NaN and infinity."""
    x = torch.randn(1000, generator=torch.Generator().manual_seed(backend.rank)).to(dtype)
    axis, bad = Mesh(4, backend.rank, tp_size=4).tp, torch.zeros(3, dtype=dtype)
    if backend.rank == 2:
        bad[0], bad[1] = float("nan"), float("inf")
    comm = backend.collectives
    assert comm.all_reduce(bad.clone(), axis, "max")[0].isnan()
    return comm.all_reduce(x, axis), comm.all_reduce(bad, axis)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_has_the_same_bits_on_all_ranks_and_is_rounded_once(ranks: RankPool, dtype: torch.dtype) -> None:
    result = ranks.run(4, sums, dtype)
    inputs = [torch.randn(1000, generator=torch.Generator().manual_seed(rank)).to(dtype).float() for rank in range(4)]
    for total, bad in result:
        assert torch.equal(total, (((inputs[0] + inputs[1]) + inputs[2]) + inputs[3]).to(dtype))
        assert bad[0].isnan() and bad[1].isinf() and bad[2] == 0


def choose(backend: CpuBackend, lacking: int, wanted: str) -> tuple[str, ...]:
    """Notes of this rank, or its error, when one rank has no compiler."""

    def fail() -> ctypes.CDLL:
        raise LibraryBuildError("no compiler")

    with mock.patch.object(cpu, "load", fail) if backend.rank == lacking else nullcontext():
        try:
            backend.choose_transport("gloo")
            backend.choose_transport(wanted)
        except BackendError as error:
            return (str(error),)
    assert backend.collectives.all_reduce(torch.ones(2), Mesh(2, backend.rank, tp_size=2).tp).tolist() == [2, 2]
    return tuple(note for note in backend.notes() if "collectives" in note)


def test_all_ranks_take_gloo_if_one_must(ranks: RankPool) -> None:
    assert ranks.run(2, choose, 1, "auto") == [
        ("CPU collectives: gloo, another rank cannot share memory",),
        ("CPU collectives: gloo, no compiler",),
    ]
    refused = "backend.cpu_transport=shared_memory cannot run here: {}; or use auto"
    assert ranks.run(2, choose, 0, "shared_memory") == [
        (refused.format("no compiler"),),
        (refused.format("another rank cannot share memory"),),
    ]
    assert set(ranks.run(2, choose, 2, "auto")) == {("CPU collectives: shared memory, gloo between hosts",)}
    assert set(ranks.run(2, choose, 2, "gloo")) == {("CPU collectives: gloo, as backend.cpu_transport=gloo asks",)}


def opened(backend: CpuBackend) -> tuple[int, int]:
    """Numbers of open files and of mapped boxes, before and after memory is shared anew."""

    def count() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text().splitlines()
        return len(os.listdir("/proc/self/fd")), sum("memfd:nxtrain" in line for line in maps)

    before = count()
    for _ in range(3):
        assert backend.collectives.share(build.load()) == ""
    assert count() == before
    backend.collectives.unshare()
    return count()[1], before[1]


def test_memory_is_freed_when_a_rank_leaves(ranks: RankPool) -> None:
    assert ranks.run(2, opened) == [(0, 2), (0, 2)]


def with_many_files(backend: CpuBackend) -> str:
    """Error of a rank with more open files than `select` can name, whose peer leaves the run."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    files = [os.open("/dev/null", os.O_RDONLY) for _ in range(1024)]
    try:
        assert backend.collectives.share(build.load()) == ""
        return left(backend)
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_rank_with_many_open_files_misses_another_as_well(ranks: RankPool) -> None:
    assert ranks.run(2, with_many_files)[0].startswith("rank 1 is gone: ")


def left(backend: CpuBackend) -> str:
    """Error of a rank whose peer leaves the run."""
    axis = Mesh(2, backend.rank, tp_size=2).tp
    backend.collectives.all_reduce(torch.ones(2), axis)
    if backend.rank == 1:
        backend.collectives.unshare()
        return ""
    try:
        backend.collectives.all_reduce(torch.ones(2), axis)
    except LostPeerError as error:
        return str(error)
    return "no error"


def test_a_rank_that_leaves_is_missed(ranks: RankPool) -> None:
    assert ranks.run(2, left)[0].startswith("rank 1 is gone: its process has ended, or it has left the run. ")
