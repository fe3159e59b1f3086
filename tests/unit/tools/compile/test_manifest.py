"""A manifest says what was compiled; a graph outside it is reported with what sets it apart."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from nxtrain.common.errors import BackendError, ConfigError
from nxtrain.config.operation_schema import CompileConfig
from nxtrain.config.schema import IdentityConfig, RunConfig
from nxtrain.tools.compile.cache import Cache
from nxtrain.tools.compile.entries import CacheKey
from nxtrain.tools.compile.manifest import (
    Build,
    CompiledGraph,
    GraphManifest,
    Setting,
    check_ready,
    differ,
    explain,
    manifest_file,
    other_manifests,
    read_manifest,
    write_manifest,
)
from tests.support.caches import COMPILER, add_done, add_failed, key

BUILD = Build(
    COMPILER,
    ("--model-type=transformer", "--auto-cast=none", "-O2"),
    {"train.micro_batch": 1, "train.seq_len": 4096, "parallel.tp": 8, "precision.params": "bf16"},
)
STEP, UPDATE = CompiledGraph("micro-step", key(1).module, 812.5), CompiledGraph("update", key(2).module, 90.0)
MANIFEST = GraphManifest("llama2_7b_trn1", BUILD, (STEP, UPDATE))


def changed(settings: Mapping[str, Setting]) -> Build:
    return replace(BUILD, settings={**BUILD.settings, **settings})


def written(folder: Path, manifest: GraphManifest = MANIFEST) -> Path:
    path = folder / "manifests" / "llama2_7b_trn1.json"
    write_manifest(manifest, path)
    return path


def test_a_manifest_reads_back_as_it_was_written_and_is_written_the_same_again(tmp_path: Path) -> None:
    manifest = replace(MANIFEST, graphs=(*MANIFEST.graphs, CompiledGraph("compiled elsewhere", key(3).module, None)))
    path = written(tmp_path, manifest)
    first = path.read_text(encoding="utf-8")
    assert read_manifest(path) == manifest
    assert written(tmp_path, read_manifest(path)).read_text(encoding="utf-8") == first
    assert [file.name for file in path.parent.iterdir()] == ["llama2_7b_trn1.json"]


def test_the_file_of_a_manifest_is_named_after_the_run_unless_it_is_chosen() -> None:
    run = IdentityConfig(name="mine")
    assert manifest_file(RunConfig(run=run)) == Path("compile_cache/manifests/mine.json")
    assert manifest_file(RunConfig(run=run, compile=CompileConfig(manifest=Path("a/{name}.b")))) == Path("a/mine.b")
    with pytest.raises(ConfigError, match=r"compile\.manifest: '\{host\}' has \{host\}; only \{name\} is filled in"):
        manifest_file(RunConfig(compile=CompileConfig(manifest=Path("{host}"))))


def test_a_machine_of_some_stages_has_a_file_of_its_own_beside_those_of_others(tmp_path: Path) -> None:
    config = RunConfig(run=IdentityConfig(name="a[1]"), compile=CompileConfig(manifest=tmp_path / "{name}.v2.json"))
    whole, mine, theirs = (manifest_file(config, stages) for stages in ((), (0, 1, 3), (2,)))
    assert [file.name for file in (whole, mine, theirs)] == [
        "a[1].v2.json",
        "a[1].v2.stages-0-1_3.json",
        "a[1].v2.stages-2.json",
    ]
    assert other_manifests(config, mine) == []
    stages = replace(MANIFEST, build=changed({"parallel.pp": 4}), stages=(0, 1, 3))
    write_manifest(stages, mine)
    write_manifest(MANIFEST, theirs)
    write_manifest(MANIFEST, tmp_path / "a[1]-other.v2.json")
    assert read_manifest(mine) == stages
    assert other_manifests(config, mine) == [theirs]
    write_manifest(MANIFEST, whole)
    assert other_manifests(config, mine) == [whole, theirs]
    with pytest.raises(BackendError, match=r"lacks 2 of the 2 graphs of llama2_7b_trn1, pipeline stages 0-1, 3 of 4, "):
        check_ready(stages, Cache(tmp_path))


def test_a_manifest_from_before_there_were_stages_is_one_of_all(tmp_path: Path) -> None:
    path = written(tmp_path)
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record.pop("stages") == []
    path.write_text(json.dumps(record), encoding="utf-8")
    assert read_manifest(path) == MANIFEST


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda record: record.update(stages=["x"]), "not a manifest of graphs"),
        (lambda record: record.pop("graphs"), "not a manifest of graphs"),
        (lambda record: record["build"].pop("flags"), "not a manifest of graphs"),
        (lambda record: record.update(version=2), "version 2, not 1"),
        (lambda record: record["graphs"][0].update(module="../x"), "'../x' is not a key of a graph"),
    ],
)
def test_what_is_no_manifest_is_refused(tmp_path: Path, change: object, words: str) -> None:
    path = written(tmp_path)
    record = json.loads(path.read_text(encoding="utf-8"))
    assert callable(change)
    change(record)
    path.write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(ConfigError, match=words):
        read_manifest(path)


def test_a_manifest_that_is_missing_or_torn_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*absent.json: No such file.*nxtrain compile writes it"):
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
        f"    on this node: nxtrain compile CONFIG, or fetch them: nxtrain cache sync SRC {tmp_path}",
    ]
    add_done(tmp_path, key(1))
    cache.quarantine_failed()
    add_done(tmp_path, key(2))
    check_ready(MANIFEST, cache)


@pytest.mark.parametrize(
    ("build", "module", "sibling", "differences"),
    [
        (changed({"train.micro_batch": 2}), key(7).module, None, ["train.micro_batch: compiled 1, needed 2"]),
        (
            changed({"precision.params": "fp32", "optim.clip": 1}),
            key(7).module,
            None,
            ["optim.clip: compiled nothing, needed 1", "precision.params: compiled 'bf16', needed 'fp32'"],
        ),
        (
            replace(BUILD, compiler="neuronxcc-2.24.8799.0+1"),
            STEP.module,
            None,
            [f"compiler: compiled {COMPILER}, needed neuronxcc-2.24.8799.0+1"],
        ),
        (
            replace(BUILD, flags=("--model-type=transformer", "--auto-cast=none", "-O1")),
            key(2, "xyz").module,
            UPDATE,
            ["flags: compiled -O2, needed -O1"],
        ),
        (
            replace(BUILD, flags=("--auto-cast=none", "--model-type=transformer", "-O2")),
            key(2, "xyz").module,
            UPDATE,
            [
                "order of flags: compiled --model-type=transformer --auto-cast=none -O2, "
                "needed --auto-cast=none --model-type=transformer -O2"
            ],
        ),
        (
            BUILD,
            key(7).module,
            None,
            ["compiler, flags and settings are equal: the code has changed since, or only the run reaches this graph"],
        ),
        (BUILD, key(1, "xyz").module, STEP, ["flags: compiled abc, needed xyz; set elsewhere, such as in a script"]),
    ],
    ids=["setting", "settings", "compiler", "flag", "order of flags", "code", "flags set elsewhere"],
)
def test_a_miss_says_what_differs(
    build: Build, module: str, sibling: CompiledGraph | None, differences: list[str]
) -> None:
    miss = explain(MANIFEST, replace(build, compiler=""), CacheKey(build.compiler, module))
    other_flags = [f"    it is {sibling.name} with other flags ({sibling.module})"] if sibling else []
    assert miss.splitlines() == [
        f"the graph {module} was not compiled beforehand",
        *other_flags,
        *(f"    {difference}" for difference in differences),
        "    precompile again with the configuration of this run: nxtrain compile CONFIG",
    ]


def test_a_compiler_that_is_not_known_yet_is_no_difference() -> None:
    assert list(differ(BUILD, replace(BUILD, compiler=""))) == []


def test_of_an_empty_manifest_every_graph_is_a_miss() -> None:
    miss = explain(replace(MANIFEST, graphs=()), BUILD, key(2))
    assert "with other flags" not in miss
