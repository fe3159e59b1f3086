"""TorchNeuron's files in a cache: listed, verified, shared, evicted, and watched during a run."""

from __future__ import annotations

import os
import random
import string
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from nxtrain.backends.base import Support
from nxtrain.backends.neuron import sdk, torchneuron, torchneuron_names
from nxtrain.common.errors import BackendError
from nxtrain.common.io.object_store import open_store
from nxtrain.config.check import Resolved, resolve_config
from nxtrain.config.load import load
from nxtrain.tools.compile import miss_watch, native_compile
from nxtrain.tools.compile.cache import Cache
from nxtrain.tools.compile.compile_key import build_of
from nxtrain.tools.compile.entries import CacheKey, hash_file, parse_key
from nxtrain.tools.compile.manifest import CompiledGraph, GraphManifest, read_manifest, write_manifest
from nxtrain.tools.compile.miss_watch import MissWatch, watch_misses
from nxtrain.tools.compile.sync import Bucket, CacheLocation, sync
from tests.support import TINY, commands
from tests.support.caches import compile_now, key


def neff(number: int) -> CacheKey:
    """Key of a graph as TorchNeuron names it."""
    digest = f"{number * 0x9E3779B97F4A7C15 % 2**128:032x}"
    return CacheKey("neff", f"{digest[:2]}/{digest[2:4]}/{digest}.neff")


def add(root: Path, number: int, text: str = "") -> CacheKey:
    """Add a graph as TorchNeuron does: under another name, then renamed."""
    result = neff(number)
    path = root / result.compiler / result.module
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_text(text or f"graph {number}", encoding="utf-8")
    draft.rename(path)
    return result


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in (root / "neff").rglob("*.neff")}


def test_drawn_names_are_keys_only_if_they_stay_inside() -> None:
    drawn = random.Random(0)
    letters = string.hexdigits + "./-_ \\"
    for _ in range(2000):
        name = "".join(drawn.choices(letters, k=drawn.randint(1, 12))) + drawn.choice(["", ".neff"])
        parts = name.split("/")
        result = parse_key(f"neff/{name}")
        hidden = any(not part or part.startswith(".") for part in parts)
        sound = name.endswith(".neff") and not hidden and not set(name) & set(" \\")
        assert (result is not None) is sound, name


def test_ls_shows_both_lanes_files_and_verify_hashes_them(tmp_path: Path) -> None:
    add(tmp_path, 1)
    empty = add(tmp_path, 2)
    (tmp_path / "neff" / empty.module).write_bytes(b"")
    out = commands.output_of("cache", "ls", str(tmp_path))
    printed = out
    assert "1 done, 1 failed" in printed
    assert neff(1).module in printed
    out = commands.output_of("cache", "verify", str(tmp_path))
    assert "0 as they were sealed, 1 hashed for the first time, 0 damaged" in out
    (tmp_path / "neff" / neff(1).module).write_text("graph 7", encoding="utf-8")
    out = commands.output_of("cache", "verify", str(tmp_path), code=5)
    assert f"{neff(1)}  damaged: " in out
    cache = Cache(tmp_path)
    assert [entry.key for entry in cache.quarantined()] == [neff(1)]
    assert cache.done() == set()
    add(tmp_path, 1)  # compiled again, and another hash would do no harm
    assert [verdict.damage for verdict in cache.verify()] == [""]


def test_clean_quarantines_empty_files_and_evicts_the_least_used(tmp_path: Path) -> None:
    for number in range(1, 5):
        add(tmp_path, number, "x" * 1000)
        os.utime(tmp_path / "neff" / neff(number).module, (number, number))
    add(tmp_path, 9)
    (tmp_path / "neff" / neff(9).module).write_bytes(b"")
    Cache(tmp_path).mark_used([neff(1)])
    out = commands.output_of("cache", "clean", str(tmp_path))
    assert f"{neff(9)}  into quarantine" in out
    assert set(Cache(tmp_path).evict(2000)) == {neff(9), neff(2), neff(3)}
    assert Cache(tmp_path).done() == {neff(1), neff(4)}


@pytest.mark.parametrize("over", ["folder", "bucket"])
def test_nodes_share_files_of_both_lanes(tmp_path: Path, over: str) -> None:
    """Drawn sets of files on two nodes become equal over a third place, and what differs from its hash stays."""
    drawn = random.Random(over)
    first, second = tmp_path / "first", tmp_path / "second"
    for number in range(20):
        for root in (first, second):
            if drawn.random() < 0.5:
                add(root, number)
    for number in (21, 22):  # no other test's, whose watch would find the compiler among the machine's processes
        compile_now(_made(first / key(number).compiler / key(number).module), 0.0)
    location: CacheLocation = Cache(tmp_path / "shared")
    if over == "bucket":
        location = Bucket(open_store(str(tmp_path / "bucket")))
    else:
        (tmp_path / "shared").mkdir()
    for root in (first, second, first):
        assert not sync(Cache(root), location).unusable
        assert not sync(location, Cache(root)).unusable
    assert contents(first) == contents(second) != {}
    assert Cache(first).done() == Cache(second).done() == location.done()
    again = sync(location, Cache(first))
    assert again.copied == []
    damaged = next(iter(contents(first)))
    list(Cache(first).verify())
    (first / damaged).write_bytes(b"other")
    third = Cache(tmp_path / "third")
    report = sync(Cache(first), third)
    assert [str(key_) for key_ in report.unusable] == [damaged]
    assert damaged not in contents(tmp_path / "third")


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "model.done").touch()
    return folder


def test_a_watch_tells_of_each_new_file_once(tmp_path: Path) -> None:
    add(tmp_path, 1)
    reported: list[CacheKey] = []
    watch = MissWatch(Cache(tmp_path).layout("neff"), {neff(2)}, os.getpid(), lambda key, _: reported.append(key))
    for number in (2, 3):
        add(tmp_path, number)
    watch.poll()
    watch.poll()
    assert reported == [neff(3)]


@pytest.fixture
def native_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Resolved:
    """A run by TorchNeuron whose manifest has one graph."""
    for name in [name for name in os.environ if name.startswith(("NEURON", "TORCH_NEURONX", "RANK", "WORLD_SIZE"))]:
        monkeypatch.delenv(name)
    overrides = ["backend.name=neuron-native", "cluster.instance=trn2.3xlarge", "compile.on_miss=stop"]
    overrides += [f"compile.cache_dir={tmp_path}/cache", f"compile.manifest={tmp_path}/manifest.json"]
    plan = resolve_config(load(TINY, overrides), 1)
    write_manifest(
        GraphManifest("tiny", build_of(plan, 1, {}, "neff"), (CompiledGraph("graph 1", neff(1).module, None),)),
        tmp_path / "manifest.json",
    )
    return plan


def test_a_run_stops_before_it_starts_if_a_graph_is_absent(native_run: Resolved, tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=r"lacks 1 of the 1 graphs of tiny, neff"):
        watch_misses(native_run, {}).__enter__()
    add(tmp_path / "cache", 1)
    with watch_misses(native_run, {}):
        pass


def test_a_run_stops_when_it_compiles_another_graph(
    native_run: Resolved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add(tmp_path / "cache", 1)
    codes: list[int] = []
    monkeypatch.setattr(miss_watch.os, "_exit", codes.append)  # type: ignore[attr-defined]
    with watch_misses(native_run, {"NEURON_COMPILER_OPT_LEVEL": "-O3"}):
        add(tmp_path / "cache", 2)
    assert codes == [5]
    said = capsys.readouterr().err
    assert f"the graph {neff(2).module} was not compiled beforehand" in said
    assert "NEURON_COMPILER_OPT_LEVEL: compiled nothing, needed '-O3'" in said


def test_compile_rehearses_the_run_and_lists_the_graphs_that_it_used(
    native_run: Resolved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    for number in (1, 2):
        add(cache, number)
    started: list[list[str]] = []

    def compile_by_short_run(
        argv: Sequence[str], env: Mapping[str, str], check: bool
    ) -> subprocess.CompletedProcess[str]:
        started.append([*argv])
        (cache / "neff" / neff(2).module).read_bytes()
        os.utime(cache / "neff" / neff(2).module)  # as a mount with access times notes the read
        add(cache, 3)
        return subprocess.CompletedProcess(argv, 0)

    monkeypatch.setattr(torchneuron, "support", lambda *, devices=True: Support(True, "1 chip in this test"))
    monkeypatch.setattr(native_compile.subprocess, "run", compile_by_short_run)  # type: ignore[attr-defined]
    config = native_run.config
    args = [f"compile.cache_dir={config.compile.cache_dir}", f"compile.manifest={config.compile.manifest}"]
    native = ["backend.name=neuron-native", "cluster.instance=trn2.3xlarge", "checkpoint.every=50", *args]
    err = commands.errors_of("compile", str(TINY), *native, code=0)
    assert "all 2 graphs are in" in err
    assert len(started) == 1
    assert {"train.steps=4", "checkpoint.every=2", "checkpoint.resume=never"} < set(started[0])
    result = read_manifest(tmp_path / "manifest.json")
    assert {graph.module for graph in result.graphs} == {neff(2).module, neff(3).module}
    assert result.build.compiler == "neff"


@pytest.mark.parametrize(
    ("reads", "overrides", "why"),
    [
        (None, [], "TorchNeuron is not installed here"),
        (False, [], "the installed TorchNeuron does not read TORCH_NEURONX_COMPILE_ONLY"),
        (True, ["compile.torch_compile=false"], "compile.torch_compile=true is needed"),
        (True, ["cluster.instance="], "cluster.instance is needed"),
    ],
)
def test_without_devices_compile_says_why_the_mode_without_them_cannot_be_had(
    native_run: Resolved,
    monkeypatch: pytest.MonkeyPatch,
    reads: bool | None,
    overrides: list[str],
    why: str,
) -> None:
    monkeypatch.setattr(torchneuron_names, "reads", lambda _: reads)
    native = ["backend.name=neuron-native", "cluster.instance=trn2.3xlarge", "compile.torch_compile=true", *overrides]
    err = commands.errors_of("compile", str(TINY), *native, code=5)
    said = err
    assert why in said
    assert "no Neuron device in" in said


@pytest.mark.parametrize("chips", [0, 1])
def test_without_devices_graphs_are_compiled_in_the_mode_without_them_and_with_devices_on_these(
    native_run: Resolved,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    chips: int,
) -> None:
    started: list[Mapping[str, str]] = []

    def compile_by_short_run(
        argv: Sequence[str], env: Mapping[str, str], check: bool
    ) -> subprocess.CompletedProcess[str]:
        started.append(env)
        add(tmp_path / "cache", 3)
        return subprocess.CompletedProcess(argv, 0)

    for module in (native_compile, sdk):
        monkeypatch.setattr(module, "num_devices", lambda: chips)
    supported: list[bool] = []

    def support(*, devices: bool = True) -> Support:
        supported.append(devices)
        return Support(devices <= chips, "by this test")

    monkeypatch.setattr(torchneuron, "support", support)
    monkeypatch.setattr(torchneuron_names, "reads", lambda _: True)
    monkeypatch.setattr(native_compile.subprocess, "run", compile_by_short_run)  # type: ignore[attr-defined]
    native = ["backend.name=neuron-native", "cluster.instance=trn2.3xlarge", "compile.torch_compile=true"]
    native += [f"compile.cache_dir={tmp_path}/cache", f"compile.manifest={tmp_path}/manifest.json"]
    out = commands.output_of("compile", str(TINY), *native, "--dry-run")
    assert ("export TORCH_NEURONX_COMPILE_ONLY=1" in out) is not bool(chips)
    err = commands.errors_of("compile", str(TINY), *native, code=0)
    (env,) = started
    mode = {"TORCH_NEURONX_COMPILE_ONLY": "1", "NEURON_PLATFORM_TARGET_OVERRIDE": "trn2"}
    assert {name: env[name] for name in mode if name in env} == ({} if chips else mode)
    assert supported[-1] is bool(chips)
    assert [graph.module for graph in read_manifest(tmp_path / "manifest.json").graphs] == [neff(3).module]
    assert ("mode without one, which is untested" in err) is not bool(chips)


def test_a_file_that_a_rank_compiles_during_a_copy_stays(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    name = Path(neff(1).module).name
    with cache.staging() as folder:
        (folder / name).write_text("copied", encoding="utf-8")
        add(tmp_path, 1, "compiled")
        assert not cache.store(neff(1), folder, {name: hash_file(folder / name)})
        assert not cache.layout("neff").publish(folder, neff(1), {}), "compiled after the check"
    assert (tmp_path / "neff" / neff(1).module).read_text(encoding="utf-8") == "compiled"


def test_a_file_that_a_rank_replaces_during_a_copy_is_not_held_to_the_seal_of_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, link = Cache(tmp_path), Path.hardlink_to
    name = Path(neff(1).module).name

    def link_and_compile(path: Path, target: Path) -> None:
        link(path, target)
        add(tmp_path, 1, "compiled")

    monkeypatch.setattr(Path, "hardlink_to", link_and_compile)
    with cache.staging() as folder:
        (folder / name).write_text("copied", encoding="utf-8")
        assert cache.store(neff(1), folder, {name: hash_file(folder / name)})
    assert [(verdict.damage, verdict.is_new) for verdict in cache.verify()] == [("", True)]
    assert (tmp_path / "neff" / neff(1).module).read_text(encoding="utf-8") == "compiled"
