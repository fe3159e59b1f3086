"""A shell without variables of a run, the folder that paths start from, and programs that replace a process."""

from __future__ import annotations

import os
from typing import NamedTuple

import pytest

from tests.support import ROOT

DECIDED = (
    "NEURON",
    "TORCH_NEURON",
    "XLA_",
    "PJRT_",
    "FI_",
    "OMP_NUM_THREADS",
    "MALLOC_ARENA_MAX",
    "RANK",
    "WORLD_SIZE",
)
"""Beginnings of the names of variables that a run decides."""


class Program(NamedTuple):
    """Program that takes the place of this process."""

    path: str
    argv: list[str]
    environ: dict[str, str]


@pytest.fixture(autouse=True)
def bare_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(DECIDED)]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(ROOT)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    """Programs that `execve` would have started."""
    programs: list[Program] = []
    monkeypatch.setattr(os, "execve", lambda *program: programs.append(Program(*program)))
    return programs
