"""One process saves, and plays any rank of any layout to load: every shard is bitwise the cut of the whole tensors."""

from __future__ import annotations

import json
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader

from nxtrain.checkpoint import directory
from nxtrain.checkpoint.directory import Retention
from nxtrain.checkpoint.load import load
from nxtrain.checkpoint.meta import read_meta
from nxtrain.common import hf_files
from nxtrain.common.errors import CheckpointError, DamagedError
from nxtrain.common.mesh import Mesh
from nxtrain.common.sharding import Layout, ParamTable, ShardSpec
from tests.support.run_folders import KINDS, blank, cut, meta, same, save, table, whole

ALONE = Mesh(1, 0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return directory.step_path(tmp_path, 10)


def store(path: Path, shape: str = "gqa2", **model: bool) -> None:
    specs = table(shape, ALONE, **model)
    save(path, cut(specs, ALONE), Layout(specs, ALONE), meta())


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("shape", ["gqa2", "mqa", "odd", "tied"])
def test_any_layout_reads_what_one_rank_wrote(path: Path, shape: str, tp: int, fused: bool) -> None:
    store(path, shape, fused_qkv=not fused, fused_gate_up=not fused)
    for rank in range(tp):
        mesh = Mesh.build(tp, rank, tp=tp)
        specs = table(shape, mesh, fused_qkv=fused, fused_gate_up=fused)
        wanted = cut(specs, mesh)
        shards = blank(wanted)
        load(path, shards, Layout(specs, mesh))
        assert same(shards, wanted), f"rank {rank}"


def test_the_meta_comes_back_with_what_save_knows(path: Path) -> None:
    store(path)
    specs = table("gqa2", ALONE)
    loaded = load(path, cut(specs, ALONE), Layout(specs, ALONE))
    crc32 = zlib.crc32((path / directory.MANIFEST).read_bytes())
    assert loaded == meta(mesh={"pp": 1, "dp": 1, "tp": 1}, kinds=("model", "exp_avg"), manifest_crc32=crc32)
    assert read_meta(path) == loaded


def test_kinds_that_are_not_asked_for_are_left(path: Path) -> None:
    store(path)
    specs = table("gqa2", ALONE)
    wanted = cut(specs, ALONE, {"model": torch.bfloat16})
    shards = blank(wanted)
    load(path, shards, Layout(specs, ALONE))
    assert same(shards, wanted)


def test_parameters_that_require_gradients_are_filled_in_place(path: Path) -> None:
    store(path)
    specs = table("gqa2", ALONE)
    wanted = cut(specs, ALONE, {"model": torch.bfloat16})["model"]
    parameters = {name: torch.nn.Parameter(torch.zeros_like(tensor)) for name, tensor in wanted.items()}
    places = {name: parameter.data_ptr() for name, parameter in parameters.items()}
    load(path, {"model": parameters}, Layout(specs, ALONE))
    assert all(torch.equal(parameters[name], wanted[name]) for name in wanted)
    assert places == {name: parameter.data_ptr() for name, parameter in parameters.items()}


def test_only_the_checkpoint_is_left_and_the_tokenizer_is_in_it(path: Path, tmp_path: Path) -> None:
    tokenizer = tmp_path / "somewhere.json"
    tokenizer.write_text('{"version": "1.0"}')
    specs = table("gqa2", ALONE)
    for step in (1, 2, 3):
        save(
            directory.step_path(path.parent / "run", step),
            cut(specs, ALONE, {"model": torch.float32}),
            Layout(specs, ALONE),
            meta(step),
            tokenizer=tokenizer,
            retention=Retention(keep=2),
        )
    assert sorted(p.name for p in (path.parent / "run").iterdir()) == ["latest", "step-00000002", "step-00000003"]
    assert (path.parent / "run" / directory.LATEST).read_text() == "step-00000003\n"
    newest = directory.find_checkpoint(path.parent / "run")
    assert sorted(p.name for p in newest.iterdir()) == [
        *("manifest.json", "meta.json", "rank-00000.safetensors", "tokenizer.json", "verified")
    ]
    assert (newest / hf_files.TOKENIZER).read_text() == tokenizer.read_text()


def small(shape: tuple[int, int], *names: str) -> ParamTable:
    return ParamTable({name: ShardSpec(shape, dim=0) for name in names})


def test_every_difference_from_the_model_is_named_and_nothing_is_touched(path: Path) -> None:
    saved = small((4, 2), "same.weight", "wide.weight", "typed.weight", "old.weight")
    tensors = {name: torch.ones(4, 2) for name in saved}
    save(path, {"model": tensors}, Layout(saved, ALONE), meta())

    wanted = ParamTable({**small((4, 2), "same.weight", "typed.weight", "new.weight"), **small((4, 3), "wide.weight")})
    shards = {name: torch.zeros(spec.shape) for name, spec in wanted.items()}
    shards["typed.weight"] = torch.zeros(4, 2, dtype=torch.bfloat16)
    with pytest.raises(CheckpointError) as caught:
        load(path, {"model": shards}, Layout(wanted, ALONE))
    lines = str(caught.value).splitlines()
    assert lines[0] == f"cannot load {path}: it does not fit the model"
    assert lines[1:] == [
        "1 missing: model/new.weight",
        "1 unknown to the model: model/old.weight",
        "2 different: model/typed.weight is float32 (4, 2) instead of bfloat16 (4, 2), "
        "model/wide.weight is float32 (4, 2) instead of float32 (4, 3)",
        "it holds: model",
    ]
    assert not any(tensor.any() for tensor in shards.values())


def test_a_missing_kind_is_said_to_be_missing(path: Path) -> None:
    specs = table("gqa2", ALONE)
    save(path, cut(specs, ALONE, {"model": torch.bfloat16}), Layout(specs, ALONE), meta())
    with pytest.raises(CheckpointError, match=r"(?s)\d+ missing: exp_avg/.* and \d+ more.*it holds: model$"):
        load(path, cut(specs, ALONE), Layout(specs, ALONE))


def test_an_incomplete_or_foreign_meta_is_an_error_that_names_the_file(path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"not a complete checkpoint: cannot read meta\.json"):
        read_meta(path)
    path.mkdir()
    (path / directory.META).write_text("{")
    with pytest.raises(DamagedError, match=r"meta\.json is damaged: it is not valid JSON"):
        read_meta(path)
    for content in ("{}", "[]", '"format"', "3"):
        (path / directory.META).write_text(content)
        with pytest.raises(DamagedError, match="it has no key format"):
            read_meta(path)
    (path / directory.META).write_text(json.dumps({**meta().model_dump(mode="json"), "format": 1}))
    with pytest.raises(CheckpointError, match="has format 1; this nxtrain reads format 2"):
        read_meta(path)
    (path / directory.META).write_text(meta().sealed().replace('"samples": 80', '"samples": 81'))
    with pytest.raises(DamagedError, match="checksum does not match"):
        read_meta(path)


def halve(content: bytearray) -> bytearray:
    return content[: len(content) // 2]


def last_byte_off(content: bytearray) -> bytearray:
    return content[:-1]


def zero_a_page(content: bytearray) -> bytearray:
    middle = len(content) // 2
    return content[:middle] + bytes(4096) + content[middle + 4096 :]


def flip_a_bit(content: bytearray) -> bytearray:
    content[len(content) * 2 // 3] ^= 4
    return content


@pytest.mark.parametrize("damage", [halve, last_byte_off, zero_a_page, flip_a_bit])
@pytest.mark.parametrize("file", ["meta.json", "manifest.json", "rank-00000.safetensors"])
def test_any_damage_is_found_and_the_file_is_named(
    path: Path, file: str, damage: Callable[[bytearray], bytearray]
) -> None:
    store(path)
    (path / file).write_bytes(damage(bytearray((path / file).read_bytes())))
    specs = table("gqa2", ALONE)
    with pytest.raises(DamagedError) as caught:
        load(path, blank(cut(specs, ALONE)), Layout(specs, ALONE))
    assert caught.value.file == path / file


def test_others_read_it_without_nxtrain(path: Path) -> None:
    """Any reader of safetensors; and torch's own of sharded ones, which learns the offsets from the header."""
    store(path)
    specs = table("gqa2", ALONE)
    wanted = {
        f"{kind}/{name}": whole(f"{kind}/{name}", shape, dtype)
        for kind, dtype in KINDS.items()
        for name, shape in specs.global_shapes().items()
    }
    actual = load_file(path / "rank-00000.safetensors")
    assert actual.keys() == wanted.keys()
    assert all(torch.equal(actual[key], tensor) for key, tensor in wanted.items())
    read = {key: torch.zeros_like(tensor) for key, tensor in wanted.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(read, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    assert all(torch.equal(read[key], tensor) for key, tensor in wanted.items())


def test_a_failed_save_leaves_the_old_checkpoint_and_says_why(path: Path) -> None:
    store(path)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    specs = table("gqa2", ALONE)
    with pytest.raises(CheckpointError, match=f"cannot write {path}: .*no-such-file"):
        save(path, cut(specs, ALONE), Layout(specs, ALONE), meta(), tokenizer=path.parent / "no-such-file")
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    assert sorted(entry.name for entry in path.parent.iterdir()) == [directory.LATEST, path.name]


def test_ranks_that_do_not_add_up_to_whole_tensors_cannot_save(path: Path) -> None:
    mesh = Mesh.build(2, 0, tp=2)
    specs = table("gqa2", mesh)
    with pytest.raises(CheckpointError, match="the shards of all ranks have"):
        save(path, cut(specs, mesh, {"model": KINDS["model"]}), Layout(specs, mesh), meta())
    assert not path.exists()
