"""Ranks take the same kernels: where one of them cannot build ours, all take torch's."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from unittest import mock

import pytest

from nxtrain.backends import cpu
from nxtrain.backends.base import Backend
from nxtrain.backends.cpu_native.build import KernelBuildError
from nxtrain.common.errors import BackendError
from tests.support.ranks import RankPool

WORLD = 2


def choose(backend: Backend, lacking: int, wanted: str) -> tuple[str, tuple[str, ...]]:
    """Kernels of this rank and its note, or its error, when one rank has no compiler."""

    def fail() -> ctypes.CDLL:
        raise KernelBuildError("no compiler")

    patch = mock.patch.object(cpu, "load", fail) if backend.rank == lacking else nullcontext()
    try:
        with patch:
            backend.choose_kernels(wanted)
        return type(backend.kernels).__name__, backend.notes()[:1]
    except BackendError as error:
        return "", (str(error),)
    finally:
        backend.choose_kernels("auto")


@pytest.mark.parametrize("lacking", range(WORLD))
def test_all_ranks_take_torchs_kernels_if_one_must(ranks: RankPool, lacking: int) -> None:
    found = ranks.run(WORLD, choose, lacking, "auto")
    assert [kernels for kernels, _ in found] == ["CpuKernels"] * WORLD
    reasons = [note for _, (note,) in found]
    assert reasons[lacking] == "CPU kernels: torch's, no compiler"
    assert reasons[1 - lacking] == "CPU kernels: torch's, another rank cannot build ours"


def test_all_ranks_end_if_one_cannot_take_what_is_wanted(ranks: RankPool) -> None:
    found = ranks.run(WORLD, choose, 0, "native")
    assert all("backend.cpu_kernels=native cannot run here" in note for _, (note,) in found)


def test_all_ranks_take_our_kernels_where_all_can(ranks: RankPool) -> None:
    found = ranks.run(WORLD, choose, WORLD, "auto")
    assert {kernels for kernels, _ in found} == {"NativeKernels"}
