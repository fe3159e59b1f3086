"""Drawn shapes and layouts on several XLA devices with real collectives, beside transformers with `torch.optim`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.drawn import SEED, Drawn, draw
from tests.support.drawn_runs import error_of, failures, first_weights, wanted
from tests.support.layouts import Degrees, covering_array, is_for_xla
from tests.support.lora import (
    DrawnAdapters,
    all_weights,
    draw_adapters,
    wanted_of_one_rank,
    wanted_of_peft,
    with_dropout,
    with_keys,
)
from tests.support.parity import Course
from tests.support.xla_bodies import drawn_courses
from tests.support.xla_engine import run_devices

LAYOUTS = covering_array(SEED, 12, is_for_xla)
GROUPS: dict[str, list[Drawn]] = {}
for _index, _degrees in enumerate(LAYOUTS):
    GROUPS.setdefault(f"{_degrees.world} devices", []).append(draw("xla", SEED, _index, _degrees, xla=True))
ADAPTED = [
    draw_adapters("xla-lora", SEED, _index, _degrees, xla=True)
    for _index, _degrees in enumerate(LAYOUTS)
    if _index in {1, 2, 4}
]
DROPPED = [
    with_keys(with_dropout(_run), train__global_batch=3 * _run.resolved.config.train.global_batch)
    for _run in ADAPTED
    if _run.degrees.tp == 2 or _run.degrees.pp == 2
]
for _run in (*ADAPTED, *DROPPED):
    GROUPS[f"{_run.degrees.world} devices"].append(_run)

CONTEXT = [
    *covering_array(SEED, 12, lambda degrees: is_for_xla(degrees) and degrees.world < 4, cp=True),
    *covering_array(SEED, 6, lambda degrees: is_for_xla(degrees) and degrees.world == 4 > degrees.cp, cp=True)[:6],
]
for _index, _degrees in enumerate(CONTEXT):
    GROUPS.setdefault(f"cp on {_degrees.world} devices", []).append(draw("xla-cp", SEED, _index, _degrees, xla=True))

EXPERTS = [
    *covering_array(SEED + 1, 6, lambda degrees: is_for_xla(degrees) and degrees.world in (2, 3))[:6],
    *covering_array(SEED + 1, 3, lambda degrees: is_for_xla(degrees) and degrees.world == 2, cp=True)[:3],
]
for _index, _degrees in enumerate(EXPERTS):
    _drawn = draw("xla-mixtures", SEED, _index, _degrees, xla=True)
    GROUPS.setdefault(f"experts on {_degrees.world} devices", []).append(_drawn)

DIVIDED = covering_array(SEED, 5, lambda degrees: is_for_xla(degrees) and degrees.world in (2, 3), ep=True)[:3]
DIVIDED += [Degrees(tp=2, dp=2, ep=2, sequence_parallel=True), Degrees(dp=4, ep=2, shard="zero1")]
for _index, _degrees in enumerate(DIVIDED):
    _drawn = draw("xla-ep-mixtures", SEED, _index, _degrees, xla=True)
    GROUPS.setdefault(f"divided experts on {_degrees.world} devices", []).append(_drawn)

REPEATED = ("4 devices", "experts on 3 devices", "cp on 3 devices")
GROUPS_OF_A_RUN = [pytest.param(group, marks=[pytest.mark.slow] * group.endswith(REPEATED)) for group in GROUPS]
"""Runs on four devices take as long as all others; `test_parity` has steps of four and eight.

Experts and context parallelism on three devices repeat what those on two prove; ranks of gloo hold every number.
"""


def expected(run: Drawn) -> Course:
    """The course of the reference; of runs with masks, that of one CPU rank."""
    if not isinstance(run, DrawnAdapters):
        return wanted(run)
    return wanted_of_one_rank(run) if run in DROPPED else wanted_of_peft(run)


@pytest.mark.parametrize("group", GROUPS_OF_A_RUN)
def test_drawn_runs_on_devices_equal_transformers(group: str, tmp_path: Path) -> None:
    """All runs of one number of devices share a process, which takes long to start."""
    runs = GROUPS[group]
    cases = [(run, all_weights(run) if isinstance(run, DrawnAdapters) else first_weights(run)) for run in runs]
    by_rank = run_devices(runs[0].degrees.world, drawn_courses, cases, folder=tmp_path)
    courses = zip(*by_rank, strict=True)
    wants = [expected(run) for run in runs]
    errors = [(run, error_of(actual, want, run)) for run, actual, want in zip(runs, courses, wants, strict=True)]
    assert not failures(errors), failures(errors)


def test_there_are_a_dozen() -> None:
    assert sum(map(len, GROUPS.values())) >= 12
