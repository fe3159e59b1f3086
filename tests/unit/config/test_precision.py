"""Presets of number types, and the rules of fp16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nxtrain.common.errors import ConfigError, Problem
from nxtrain.config.check import resolve_config
from nxtrain.config.load import load
from nxtrain.config.precision import PRESETS
from nxtrain.config.show import dump

KEYS = ("params", "accumulate", "reduce", "update", "state")
FP16 = ("precision.params=fp16", "precision.update=fp32_master")


def file(tmp_path: Path, text: str = "") -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def types(tmp_path: Path, *overrides: str, text: str = "") -> tuple[Any, ...]:
    precision = load(file(tmp_path, text), overrides).config.precision
    return tuple(getattr(precision, key) for key in KEYS)


def problems(tmp_path: Path, *overrides: str, text: str = "") -> list[Problem]:
    with pytest.raises(ConfigError) as raised:
        resolve_config(load(file(tmp_path, text), overrides), 1)
    return list(raised.value.problems)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("manual", ("fp32", "fp32", "fp32", "fp32", "fp32")),
        ("fp32", ("fp32", "fp32", "fp32", "fp32", "fp32")),
        ("bf16SR", ("bf16", "bf16", "bf16", "bf16_stochastic", "bf16")),
        ("mixed_precision", ("bf16", "fp32", "fp32", "fp32_master", "fp32")),
        ("autocast", ("bf16", "fp32", "fp32", "fp32_master", "fp32")),
    ],
)
def test_a_preset_is_what_its_name_means_in_nxd_training(tmp_path: Path, name: str, expected: tuple[str, ...]) -> None:
    assert types(tmp_path, f"precision.type={name}") == expected
    assert types(tmp_path, text=f'[precision]\ntype = "{name}"\n') == expected
    loaded = load(file(tmp_path), [f"precision.type={name}"])
    resolve_config(loaded, 1)
    again = load(file(tmp_path, dump(loaded.config)))
    assert again.config == loaded.config
    origin = "default" if name == "manual" else f"precision.type={name}, override"
    assert loaded.origins["precision.params"] == origin


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("key", KEYS)
def test_a_key_that_contradicts_its_preset_is_refused_and_one_that_agrees_is_not(
    tmp_path: Path, name: str, key: str
) -> None:
    value = PRESETS[name][key]
    assert types(tmp_path, f"precision.type={name}", f"precision.{key}={value}") == tuple(PRESETS[name].values())
    other = "bf16_kahan" if key == "update" else {"fp32": "bf16", "bf16": "fp32"}[value]
    text = f'[precision]\n{key} = "{other}"\n'
    (problem,) = problems(tmp_path, f"precision.type={name}", text=text)
    assert (problem.key, problem.origin) == (f"precision.{key}", f"{tmp_path / 'run.toml'}:2")
    assert f"precision.type={name} means {value}" in problem.reason


def test_master_copies_beside_random_rounding_are_refused_with_both_ways_out(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, "precision.type=mixed_precisionSR")
    assert problem.key == "precision.type" and "mixed_precision, or bf16SR" in problem.hint


def test_an_unknown_preset_gets_the_nearest_name(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, "precision.type=mixed_precison")
    assert problem.hint == "did you mean mixed_precision?"


def test_fp16_has_masters_and_runs_on_cpu_and_cuda(tmp_path: Path) -> None:
    for backend in ("auto", "cpu", "cuda"):
        resolve_config(load(file(tmp_path), [*FP16, f"backend.name={backend}"]), 1)
    for backend in ("xla", "neuron", "neuron-native"):
        (problem,) = problems(tmp_path, *FP16, f"backend.name={backend}")
        assert problem.key == "precision.params" and "use bf16" in problem.hint
    (problem,) = problems(tmp_path, "precision.params=fp16", "precision.update=bf16_kahan")
    assert problem.key == "precision.update" and problem.hint == "use fp32_master"


@pytest.mark.parametrize("key", ["accumulate", "reduce", "state"])
def test_fp16_sums_in_fp32(tmp_path: Path, key: str) -> None:
    result = problems(tmp_path, *FP16, f"precision.{key}=bf16", "optim.betas=[0.9, 0.95]")
    assert [problem.key for problem in result] == [f"precision.{key}"]


@pytest.mark.parametrize("key", ["loss_scale=8.0", "loss_scale_every=7"])
def test_a_loss_scale_needs_fp16(tmp_path: Path, key: str) -> None:
    resolve_config(load(file(tmp_path), [*FP16, f"precision.{key}"]), 1)
    (problem,) = problems(tmp_path, f"precision.{key}")
    assert problem.key == f"precision.{key.partition('=')[0]}"


def test_nxds_layers_have_no_loss_scale(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, *FP16, "backend.layers=nxd", "backend.name=cpu")
    assert problem.key == "precision.params"


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "mxfp8"])
@pytest.mark.parametrize(
    ("overrides", "key", "reason"),
    [
        (["backend.name=xla"], "precision.fp8", "kernels of GPUs, which backend.name=xla lacks"),
        (["backend.name=neuron"], "precision.fp8", "kernels of GPUs, which backend.name=neuron lacks"),
        (["precision.params=fp16", "precision.update=fp32_master"], "precision.fp8", "is for GPUs with bf16"),
        (["backend.layers=nxd"], "precision.fp8", "which backend.layers=nxd replaces"),
        (["finetune.method=qlora", "model.init=hf"], "precision.fp8", "keeps these in NF4"),
        (["parallel.async_tp=true"], "parallel.async_tp", "casts between a collective and its product"),
    ],
)
def test_float8_has_layers_and_devices_of_its_own(
    tmp_path: Path, recipe: str, overrides: list[str], key: str, reason: str
) -> None:
    found = problems(tmp_path, f"precision.fp8={recipe}", *overrides)
    assert any((each.key, bool(each.hint)) == (key, True) and reason in each.reason for each in found)


def test_kernels_of_rows_and_blocks_return_bf16(tmp_path: Path) -> None:
    on_gpu = ("backend.name=cuda", "precision.params=fp32")
    for recipe in ("rowwise", "mxfp8"):
        (found,) = problems(tmp_path, f"precision.fp8={recipe}", *on_gpu)
        assert (found.key, found.hint) == ("precision.fp8", "use precision.params=bf16, or tensorwise")
    for fine in (["precision.fp8=tensorwise", *on_gpu], ["precision.fp8=rowwise", "backend.name=cpu"]):
        resolve_config(load(file(tmp_path), fine), 1)
