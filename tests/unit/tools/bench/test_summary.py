"""Medians over rounds, ratios inside each round, and the choice of what is measured."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nxtrain.common.errors import BackendError, ConfigError
from nxtrain.tools.bench import train
from nxtrain.tools.bench.harness import machine, median_ratio
from nxtrain.tools.bench.train import (
    COMPILED,
    OURS,
    PEAK,
    PEER,
    TITAN,
    Workload,
    check_backend,
    choose_candidates,
    measure,
    ratio_clock,
    summarize,
    workload,
)

WORK = workload(steps=2, batch=5, seq_len=100, precision="bf16", preset="tiny")
TOKENS = 1000


def turns(*cpu_s: float, wall: float = 3.0, first: float = 9.0) -> list[dict[str, Any]]:
    """Turns of so many seconds, after a first step that took long."""
    common = {"loss": 6.0, "maker_flops": None, "device_type": "cpu", "notes": ["C++"], "first_step_s": first}
    return [{"cpu": one, "wall": wall * one, "step_s": one / 2, **common} for one in cpu_s]


def peaks(*flops: float) -> list[dict[str, Any]]:
    return [{"cpu": one, "wall": one / 2} for one in flops]


def test_a_round_in_which_the_machine_was_slow_changes_no_ratio() -> None:
    measured = {OURS: turns(1.0, 10.0, 1.0), PEER: turns(2.0, 20.0, 2.0), PEAK: peaks(8e9, 8e8, 8e9)}
    result = summarize(measured, WORK)
    assert result["ratios"] == {PEER: 2.0}
    assert result["ratios_of"][OURS][PEER]["rounds"] == [2.0, 2.0, 2.0]
    assert result["ratio"] == 2.0
    flops = result["flops_per_token"]
    assert result[OURS] == {"tokens_per_s": TOKENS, "mfu": pytest.approx(TOKENS * flops / 8e9)}
    assert result[PEER] == {"tokens_per_s": TOKENS / 2, "mfu": pytest.approx(TOKENS * flops / 16e9)}
    assert result["peak_flops"] == 8e9


def test_ratios_are_of_the_faster_of_our_candidates_and_wall_time_counts_with_more_threads() -> None:
    measured = {OURS: turns(2.0, wall=1.0), COMPILED: turns(1.0), PEER: turns(4.0, wall=1.0), PEAK: peaks(1e9)}
    result = summarize(measured, WORK)
    assert (result["clock"], result["ours"], result["ratios"]) == ("cpu", COMPILED, {PEER: 4.0})
    assert [row.get("compile_s") for row in result["rows"]] == [None, 8.5, None, None]
    two = Workload(**{**vars(WORK), "threads": 2})
    result = summarize(measured, two)
    assert (result["clock"], result["ours"]) == ("wall", OURS)
    assert result["ratios"] == {PEER: 2.0}
    assert result["peak_flops"] == 0.5e9


@pytest.mark.parametrize(
    ("device", "threads", "clocks", "clock"),
    [
        ("cpu", 1, {"cpu", "wall"}, "cpu"),
        ("cpu", 2, {"cpu", "wall"}, "wall"),
        ("xla", 1, {"cpu", "wall"}, "wall"),
        ("gpu", 1, {"cpu", "wall", "device"}, "device"),
    ],
)
def test_the_clock_of_ratios(device: str, threads: int, clocks: set[str], clock: str) -> None:
    assert ratio_clock(device, threads, sorted(clocks)) == clock


def test_a_median_is_of_ratios_and_not_a_ratio_of_medians() -> None:
    assert median_ratio([1.0, 4.0, 9.0], [1.0, 2.0, 9.0]) == 1.0


def test_packages_that_are_absent_are_left_out_and_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "find_spec", lambda name: object())
    assert choose_candidates([], "cpu") == (list(train.CANDIDATES), {})
    monkeypatch.setattr(train, "find_spec", lambda name: None)
    chosen, left_out = choose_candidates([], "cpu")
    assert chosen == [OURS, COMPILED]
    assert left_out[PEER] == "transformers is not installed"
    with pytest.raises(BackendError, match="transformers is not installed"):
        choose_candidates([OURS, PEER], "cpu")


def test_whole_steps_are_not_compiled_twice() -> None:
    chosen, left_out = choose_candidates([], "xla")
    assert OURS in chosen
    assert COMPILED not in chosen
    assert "compiles whole steps itself" in left_out[COMPILED]


def test_other_families_are_measured_by_those_that_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "find_spec", lambda name: object())
    chosen, left_out = choose_candidates([], "cpu", "mixtral", has_experts=True)
    assert OURS in chosen and PEER in chosen
    assert set(left_out) == {COMPILED, TITAN}
    work = workload(steps=1, batch=2, seq_len=64, precision="fp32", preset="mixtral/tiny")
    assert (work.family, work.model.num_hidden_layers) == ("mixtral", 2)


class Sides:
    """Workers of candidates that take turns in no time, and the most that live at once."""

    def __init__(self) -> None:
        self.alive: set[str] = set()
        self.most = 0
        self.order: list[str] = []

    def start(self, _: str, name: str, *__: object) -> ExitStack:
        worker = ExitStack()
        worker.callback(self.alive.remove, name)
        self.alive.add(name)
        self.most = max(self.most, len(self.alive))
        vars(worker)["turn"] = lambda request="": self.turn(name, request)
        return worker

    def turn(self, name: str, request: str) -> dict[str, Any]:
        assert name in self.alive
        if not request:
            self.order.append(name)
        return {"kinds": {}} if request else turns(1.0)[0]


@pytest.mark.parametrize(("backend", "most"), [("cpu", 3), ("xla", 3), ("cuda", 1), ("neuron-native", 1)])
def test_the_memory_of_a_device_holds_one_candidate_at_a_time(
    monkeypatch: pytest.MonkeyPatch, backend: str, most: int
) -> None:
    workers = Sides()
    monkeypatch.setattr(train, "BenchWorker", workers.start)
    measured, parts = measure(replace(WORK, backend=backend), [OURS, PEER], rounds=2)
    assert (workers.most, workers.alive) == (most, set())
    assert {name: len(turns) for name, turns in measured.items()} == {OURS: 2, PEER: 2, PEAK: 2}
    assert [*measured] == [OURS, PEER, PEAK], "the order of the table"
    assert (workers.order[:2] == [OURS, PEER]) == (most > 1), "in turns on the host"
    assert [*parts] == ([] if backend == "xla" else [OURS])


def test_an_unknown_candidate_and_an_absent_device_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'megatron'.*\n.*known: nxtrain,"):
        choose_candidates(["megatron"], "cpu")
    with pytest.raises(BackendError, match="there is no backend 'tpu'"):
        check_backend("tpu")
    with pytest.raises(BackendError, match="--backend neuron cannot run here: "):
        check_backend("neuron")
    with pytest.raises(BackendError, match="--backend xla compiles whole graphs"):
        check_backend("xla", eager=True)
    assert check_backend("cpu", eager=True) == ""


def test_the_machine_is_read_from_cpuinfo(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu avx2 avx512f amx_bf16 avx512_bf16\n\n")
    result = machine(file)
    assert result["cpu"] == "Some CPU"
    assert result["instructions"] == ["amx_bf16", "avx512_bf16", "avx512f", "avx2"]
    assert machine(tmp_path / "none")["instructions"] == []
