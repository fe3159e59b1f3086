"""One process saves, and plays any rank of any layout to load: every shard is bitwise the cut of the whole tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from nxtrain.checkpoint import layout
from nxtrain.checkpoint.load import load
from nxtrain.checkpoint.meta import read_meta
from nxtrain.checkpoint.save import save
from nxtrain.errors import CheckpointError
from nxtrain.mesh import Mesh
from nxtrain.sharding import Layout, ParamTable, ShardSpec
from tests.support.checkpoints import KINDS, blank, cut, meta, same, table

ALONE = Mesh(1, 0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return layout.step_path(tmp_path, 10)


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
    assert loaded == meta(mesh={"pp": 1, "dp": 1, "tp": 1}, kinds=("model", "exp_avg"))
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
            layout.step_path(path.parent / "run", step),
            cut(specs, ALONE, {"model": torch.float32}),
            Layout(specs, ALONE),
            meta(step),
            tokenizer=tokenizer,
            keep=2,
        )
    assert sorted(p.name for p in (path.parent / "run").iterdir()) == ["step-00000002", "step-00000003"]
    newest = layout.resolve(path.parent / "run")
    assert sorted(p.name for p in newest.iterdir()) == [".metadata", "__0_0.distcp", "meta.json", "tokenizer.json"]
    assert (newest / layout.TOKENIZER).read_text() == tokenizer.read_text()


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
    (path / layout.META).write_text("{")
    with pytest.raises(CheckpointError, match=r"meta\.json is damaged"):
        read_meta(path)
    (path / layout.META).write_text(json.dumps({**meta().model_dump(mode="json"), "format": 2}))
    with pytest.raises(CheckpointError, match="has format 2; this nxtrain reads format 1"):
        read_meta(path)


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
def test_a_torn_file_is_a_checkpoint_error_and_nothing_is_touched(path: Path, file: str) -> None:
    store(path)
    whole = (path / file).read_bytes()
    (path / file).write_bytes(whole[: len(whole) // 2])
    specs = table("gqa2", ALONE)
    shards = blank(cut(specs, ALONE))
    with pytest.raises(CheckpointError, match=f"cannot load {path}"):
        load(path, shards, Layout(specs, ALONE))
    assert same(shards, blank(shards))


def test_a_failed_save_leaves_the_old_checkpoint_and_says_why(path: Path) -> None:
    store(path)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    specs = table("gqa2", ALONE)
    with pytest.raises(CheckpointError, match=f"cannot write {path}: .*no-such-file"):
        save(path, cut(specs, ALONE), Layout(specs, ALONE), meta(), tokenizer=path.parent / "no-such-file")
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    assert list(path.parent.iterdir()) == [path]


def test_ranks_that_do_not_add_up_to_whole_tensors_cannot_save(path: Path) -> None:
    mesh = Mesh.build(2, 0, tp=2)
    specs = table("gqa2", mesh)
    with pytest.raises(CheckpointError, match="ranks hold"):
        save(path, cut(specs, mesh, {"model": KINDS["model"]}), Layout(specs, mesh), meta())
    assert not path.exists()
