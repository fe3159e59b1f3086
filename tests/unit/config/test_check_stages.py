"""Pipeline stages that cannot be are refused, with the numbers that contradict each other and those that would work."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from nxtrain.common.errors import ConfigError
from nxtrain.config.check import resolve_config
from nxtrain.config.load import load
from nxtrain.train import command
from tests.unit.config.test_check import checked, only, problems


@pytest.mark.parametrize("name", ["xla", "neuron"])
def test_an_odd_number_of_stages_does_not_pair_up(tmp_path: Path, name: str) -> None:
    def said(pp: int) -> list[str]:
        result = problems(tmp_path, f"parallel.pp={pp}", f"backend.name={name}", "optim.warmup_steps=9999999")
        return [problem.hint for problem in result if "is odd" in problem.reason]

    assert said(3) == ["use parallel.pp=2 or 4"]
    assert said(2) == []


def test_a_run_is_held_to_the_rules_of_the_backend_that_auto_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine is a stand-in: all that is asked of it is its name and its size."""
    machine = SimpleNamespace(name="neuron", world=3, failed=lambda error: error, close=lambda: None)
    monkeypatch.setattr(command, "choose", lambda name, **_: ("neuron", "the first that can run here"))
    monkeypatch.setattr(command, "choose_layers", lambda name, backend, **_: ("native", ""))
    monkeypatch.setattr(command, "open_backend", lambda *args, **_: machine)
    path = tmp_path / "run.toml"
    path.touch()
    loaded = load(path, ["parallel.pp=3", "model.config.num_hidden_layers=6"])
    with pytest.raises(ConfigError) as raised:
        command.train(loaded, resolve_config(loaded, 3))
    (problem,) = raised.value.problems
    assert problem.reason.startswith("3 is odd, and on backend.name=neuron")


def shaped(tmp_path: Path, *overrides: str, layers: int = 6, world: int | None = None) -> list[tuple[str, str, str]]:
    """Problems with the stages of a model of so many blocks: key, reason, way out."""
    result = problems(tmp_path, f"model.config.num_hidden_layers={layers}", *overrides, world=world)
    return [(problem.key, problem.reason, problem.hint) for problem in result]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["parallel.pp=7"],
            (
                "parallel.pp",
                "pp=7 stages cannot share model.config.num_hidden_layers=6: each has one block or more",
                "use at most parallel.pp=6",
            ),
        ),
        (
            ["parallel.pp=2", "parallel.virtual_pp=4"],
            (
                "parallel.virtual_pp",
                "pp=2 x virtual_pp=4 = 8 chunks cannot share model.config.num_hidden_layers=6: each has one block or "
                "more",
                "use at most parallel.virtual_pp=3",
            ),
        ),
        (
            ["parallel.pp=8", "parallel.virtual_pp=2"],
            (
                "parallel.pp",
                "pp=8 x virtual_pp=2 = 16 chunks cannot share model.config.num_hidden_layers=6: each has one block or "
                "more",
                "use at most parallel.pp=6",
            ),
        ),
        (
            ["parallel.virtual_pp=2"],
            (
                "parallel.virtual_pp",
                "2 chunks interleave with chunks of other pipeline stages, but pp=1 has one stage",
                "use parallel.virtual_pp=1, or parallel.pp=2 or more",
            ),
        ),
        (
            ["parallel.pipeline_cuts=[3]"],
            (
                "parallel.pipeline_cuts",
                "[3] lists where pipeline stages begin, but pp=1 has one stage",
                "leave it out, or use parallel.pp=2 or more",
            ),
        ),
        *(
            (
                ["parallel.pp=3", f"parallel.pipeline_cuts={cuts}"],
                (
                    "parallel.pipeline_cuts",
                    f"{cuts} lists where all chunks but the first begin. With pp=3 x virtual_pp=1 it must have 2, "
                    "ascending and below model.config.num_hidden_layers=6",
                    "leave it out to cut by cost",
                ),
            )
            for cuts in ([3], [1, 2, 3], [4, 2], [2, 2], [2, 6])
        ),
    ],
)
def test_stages_that_the_blocks_do_not_fill_are_refused(
    tmp_path: Path, overrides: list[str], expected: tuple[str, str, str]
) -> None:
    assert shaped(tmp_path, *overrides) == [expected]


@pytest.mark.parametrize(
    "overrides",
    [
        ["parallel.pp=6"],
        ["parallel.pp=2", "parallel.virtual_pp=3"],
        ["parallel.pp=3", "parallel.pipeline_cuts=[1, 5]"],
        ["parallel.pp=3", "backend.name=cpu"],
        *(
            ["parallel.pp=3", "parallel.schedule=zero_bubble", other]
            for other in ("parallel.shard=zero1", "backend.name=neuron-native", "backend.layers=native")
        ),
    ],
)
def test_stages_that_fit_run(tmp_path: Path, overrides: list[str]) -> None:
    checked(tmp_path, "model.config.num_hidden_layers=6", *overrides)


@pytest.mark.parametrize(
    ("override", "reason", "hint"),
    [
        (
            "parallel.pp=1",
            "fills the bubble of a pipeline, but pp=1 has no bubble",
            "parallel.pp=2 or more",
        ),
        ("parallel.virtual_pp=2", "has one chunk for each stage, but virtual_pp=2", "parallel.virtual_pp=1"),
        (
            "backend.name=xla",
            "overlaps transfers with computation, but on backend.name=xla a transfer blocks both ranks",
            "backend.name=cpu, cuda or neuron-native",
        ),
        (
            "backend.layers=nxd",
            "splits the backward pass of nxtrain's own layers, but backend.layers=nxd",
            "backend.layers=native",
        ),
        *(
            (
                f"parallel.shard={shard}",
                f"needs whole parameters after the backward pass, but shard={shard} frees and reduces them there",
                "parallel.shard=zero1",
            )
            for shard in ("grad_op", "full", "hybrid")
        ),
        (
            "compile.torch_compile=true",
            "splits the backward pass of layers, but compile.torch_compile makes one graph of each block",
            "compile.torch_compile=false",
        ),
    ],
)
def test_weight_gradients_that_cannot_be_postponed_are_refused(
    tmp_path: Path, override: str, reason: str, hint: str
) -> None:
    result = shaped(tmp_path, "parallel.pp=2", "backend.name=cpu", "parallel.schedule=zero_bubble", override)
    assert result == [("parallel.schedule", f"zero_bubble {reason}", f"use {hint}, or parallel.schedule=1f1b")]


def test_no_stage_begins_before_the_model_does(tmp_path: Path) -> None:
    result = only(tmp_path, "parallel.pp=2", "parallel.pipeline_cuts=[0]")
    assert (result.key, result.reason) == ("parallel.pipeline_cuts", "0: must be greater than 0")


def test_stages_leave_fewer_ranks_to_share_the_batch(tmp_path: Path) -> None:
    overrides = ("parallel.tp=2", "parallel.pp=2", "train.global_batch=6", "train.micro_batch=3")
    checked(tmp_path, *overrides, "model.config.num_hidden_layers=2", world=8)
    (result,) = shaped(tmp_path, *overrides, world=16)
    assert result == (
        "train.global_batch",
        "6 is not a multiple of micro_batch=3 x dp=4 = 12",
        "use train.global_batch=12",
    )
