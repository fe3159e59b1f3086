"""A manifest says what was compiled; a graph outside it is reported with what sets it apart."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from nxtrain.compile.cache import Cache
from nxtrain.compile.manifest import Build, Graph, Manifest, Setting, check_ready, read_manifest, write_manifest
from nxtrain.compile.misses import PrecompiledOnly, explain
from nxtrain.errors import BackendError, ConfigError
from tests.support.caches import COMPILER, add_done, add_failed, key

BUILD = Build(
    COMPILER,
    ("--model-type=transformer", "--auto-cast=none", "-O2"),
    {"train.micro_batch": 1, "train.seq_len": 4096, "parallel.tp": 8, "precision.params": "bf16"},
)
STEP, UPDATE = Graph("micro-step", key(1).module, 812.5), Graph("update", key(2).module, 90.0)
MANIFEST = Manifest("llama2_7b_trn1", BUILD, (STEP, UPDATE))


def changed(settings: Mapping[str, Setting]) -> Build:
    return replace(BUILD, settings={**BUILD.settings, **settings})


def test_a_manifest_reads_back_as_it_was_written_and_is_written_the_same_again(tmp_path: Path) -> None:
    path = write_manifest(MANIFEST, tmp_path)
    first = path.read_text(encoding="utf-8")
    assert path == tmp_path / "llama2_7b_trn1.json"
    assert read_manifest(path) == MANIFEST
    assert write_manifest(read_manifest(path), tmp_path).read_text(encoding="utf-8") == first
    assert [file.name for file in tmp_path.iterdir()] == ["llama2_7b_trn1.json"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda record: record.pop("graphs"), "no manifest of compiled graphs"),
        (lambda record: record["build"].pop("flags"), "no manifest of compiled graphs"),
        (lambda record: record.update(version=2), "version 2, not 1"),
        (lambda record: record["graphs"][0].update(module="../x"), "'../x' is no key of a graph"),
    ],
)
def test_what_is_no_manifest_is_refused(tmp_path: Path, change: object, words: str) -> None:
    path = write_manifest(MANIFEST, tmp_path)
    record = json.loads(path.read_text(encoding="utf-8"))
    assert callable(change)
    change(record)
    path.write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(ConfigError, match=words):
        read_manifest(path)


def test_a_manifest_that_is_missing_or_torn_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*absent.json: No such file.*precompile first"):
        read_manifest(tmp_path / "absent.json")
    (tmp_path / "torn.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="is not valid JSON"):
        read_manifest(tmp_path / "torn.json")


def test_a_node_is_ready_when_every_graph_of_the_manifest_is_done_there(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    add_failed(tmp_path, key(2))
    with pytest.raises(BackendError) as raised:
        check_ready(MANIFEST, cache)
    assert str(raised.value).splitlines() == [
        f"{tmp_path} lacks 2 of the 2 graphs of llama2_7b_trn1, {COMPILER}:",
        f"    micro-step ({STEP.module}): absent",
        f"    update ({UPDATE.module}): failed",
        f"    precompile on this node, or fetch them: nxtrain cache sync SRC {tmp_path}",
    ]
    add_done(tmp_path, key(1))
    cache.quarantine_failed()
    add_done(tmp_path, key(2))
    check_ready(MANIFEST, cache)


def test_a_compiled_graph_passes() -> None:
    rule = PrecompiledOnly(MANIFEST, BUILD)
    rule.check("micro-step", STEP.module)
    rule.check("another name for it", UPDATE.module)


@pytest.mark.parametrize(
    ("build", "name", "module", "nearest", "differences"),
    [
        (
            changed({"train.micro_batch": 2}),
            "micro-step",
            key(7).module,
            STEP,
            ["train.micro_batch: compiled 1, needed 2"],
        ),
        (
            changed({"precision.params": "fp32", "optim.clip": 1}),
            "update",
            key(7).module,
            UPDATE,
            ["optim.clip: compiled nothing, needed 1", "precision.params: compiled 'bf16', needed 'fp32'"],
        ),
        (
            replace(BUILD, compiler="neuronxcc-2.24.8799.0+1"),
            "micro-step",
            STEP.module,
            STEP,
            [f"compiler: compiled {COMPILER}, needed neuronxcc-2.24.8799.0+1"],
        ),
        (
            replace(BUILD, flags=("--model-type=transformer", "--auto-cast=none", "-O1")),
            "update",
            key(2, "xyz").module,
            UPDATE,
            ["flags: compiled -O2, needed -O1"],
        ),
        (
            replace(BUILD, flags=("--auto-cast=none", "--model-type=transformer", "-O2")),
            "update",
            key(2, "xyz").module,
            UPDATE,
            [
                "order of flags: compiled --model-type=transformer --auto-cast=none -O2, "
                "needed --auto-cast=none --model-type=transformer -O2"
            ],
        ),
        (
            BUILD,
            "micro-step",
            key(7).module,
            STEP,
            [f"graph: compiled {1:020d}, needed {7:020d}; settings and flags are equal, so the code has changed"],
        ),
        (
            BUILD,
            "micro-step",
            key(1, "xyz").module,
            STEP,
            ["flags: compiled abc, needed xyz; set elsewhere, such as in NEURON_CC_FLAGS"],
        ),
    ],
    ids=["setting", "settings", "compiler", "flag", "order of flags", "code", "flags of the shell"],
)
def test_a_miss_names_the_nearest_graph_and_what_differs(
    build: Build, name: str, module: str, nearest: Graph, differences: list[str]
) -> None:
    miss = explain(MANIFEST, build, name, module)
    assert miss is not None
    assert (miss.name, miss.module, miss.nearest) == (name, module, nearest)
    assert list(map(str, miss.differences)) == differences
    with pytest.raises(BackendError) as raised:
        PrecompiledOnly(MANIFEST, build).check(name, module)
    assert str(raised.value).splitlines() == [
        f"the graph {name} ({module}) was not compiled beforehand",
        f"    nearest: {nearest.name} ({nearest.module})",
        *(f"    {difference}" for difference in differences),
        "    precompile again with the configuration of this run",
    ]


def test_an_empty_manifest_has_no_nearest_graph() -> None:
    miss = explain(replace(MANIFEST, graphs=()), BUILD, "update", UPDATE.module)
    assert miss is not None
    assert (miss.nearest, str(miss)) == (None, f"the graph update ({UPDATE.module}) was not compiled beforehand")
