"""Reading Hugging Face folders: what fits is read slice by slice, what does not is named before anything is touched."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from nxtrain.backends.cpu import CpuBackend
from nxtrain.checkpoint.convert import hf_folder
from nxtrain.checkpoint.convert.hf_folder import HfFolder, HfWeights
from nxtrain.common.errors import ConfigError, InputError
from nxtrain.common.mesh import Mesh
from nxtrain.common.sharding import ParamTable
from nxtrain.config import model_folder
from nxtrain.train.build import whole_shapes
from tests.support.parity import layout, table_of
from tests.support.run_folders import blank, cut, same, table, whole

ALONE = Mesh(1, 0)
WEIGHTS = {"model": torch.float32}


def tensors_of(specs: ParamTable) -> dict[str, Tensor]:
    return {name: whole(f"model/{name}", shape, torch.float32) for name, shape in specs.global_shapes().items()}


def export(path: Path, tensors: Mapping[str, Tensor], files: int = 1, **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    names = list(tensors)
    if files == 1:
        save_file(dict(tensors), path / "model.safetensors")
        return path
    places = {name: f"part-{i % files}.safetensors" for i, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in names if places[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return path


def load_hf_weights(src: Path, tensors: Mapping[str, torch.Tensor], specs: ParamTable, mesh: Mesh) -> None:
    """Fill tensors that are zero, as a model's are before they are filled."""
    fill = HfWeights(src, specs, mesh.tp, specs.global_shapes())
    for name, local in tensors.items():
        fill(name, local.zero_())


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("shape", ["gqa2", "odd", "tied"])
def test_each_rank_gets_its_slices(tmp_path: Path, shape: str, tp: int, files: int) -> None:
    src = export(tmp_path, tensors_of(table(shape, ALONE)), files)
    for rank in range(tp):
        mesh = Mesh.build(tp, rank, tp=tp)
        specs = table(shape, mesh)
        wanted = cut(specs, mesh, WEIGHTS)
        shards = blank(wanted)
        load_hf_weights(src, shards["model"], specs, mesh)
        assert same(shards, wanted), f"rank {rank}"


@pytest.mark.parametrize("virtual_pp", [1, 2])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("shape", ["gqa2", "tied"])
def test_each_stage_gets_its_layers_and_knows_the_whole_model(
    tmp_path: Path, shape: str, tp: int, virtual_pp: int
) -> None:
    depth = {"num_hidden_layers": 5}
    resolved = layout(shape, tp=tp, pp=2, virtual_pp=virtual_pp, config=depth)
    shapes = whole_shapes(resolved, CpuBackend())
    tensors = tensors_of(table(shape, ALONE, config=depth))
    assert shapes == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    src = export(tmp_path / "whole", tensors)
    lacking = export(
        tmp_path / "lacking", {n: t for n, t in tensors.items() if n != "model.layers.2.mlp.up_proj.weight"}
    )
    strange = export(tmp_path / "strange", {**tensors, "model.layers.5.mlp.up_proj.weight": torch.zeros(96, 64)})
    filled: set[str] = set()
    for rank in range(2 * tp):
        mesh = Mesh.build(2 * tp, rank, tp=tp, pp=2)
        specs = table_of(resolved, mesh)
        wanted = cut(specs, mesh, WEIGHTS)
        shards = blank(wanted)
        fill = HfWeights(src, specs, mesh.tp, shapes)
        for name, local in shards["model"].items():
            fill(name, local.zero_())
        assert same(shards, wanted), f"rank {rank}"
        filled |= specs.global_shapes().keys()
        with pytest.raises(ConfigError, match=r"1 missing: model\.layers\.2\.mlp\.up_proj\.weight$"):
            HfWeights(lacking, specs, mesh.tp, shapes)
        with pytest.raises(ConfigError, match=r"1 unknown to the model: model\.layers\.5\.mlp\.up_proj\.weight$"):
            HfWeights(strange, specs, mesh.tp, shapes)
    assert filled == tensors.keys()


def test_weights_are_cast_to_the_type_of_the_model(tmp_path: Path) -> None:
    specs = table("gqa2", ALONE)
    src = export(tmp_path, tensors_of(specs))
    shards = blank(cut(specs, ALONE, {"model": torch.bfloat16}))["model"]
    load_hf_weights(src, shards, specs, ALONE)
    wanted = cut(specs, ALONE, WEIGHTS)["model"]
    assert all(torch.equal(shards[name], wanted[name].bfloat16()) for name in wanted)


def test_all_that_does_not_fit_is_named_and_nothing_is_touched(tmp_path: Path) -> None:
    specs = table("gqa2", ALONE)
    tensors = tensors_of(specs)
    del tensors["model.norm.weight"]
    tensors["model.embed_tokens.weight"] = torch.zeros(100, 64)
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
    src = export(tmp_path, tensors)
    shards = blank(cut(specs, ALONE, WEIGHTS))
    with pytest.raises(ConfigError) as caught:
        load_hf_weights(src, shards["model"], specs, ALONE)
    prefix = f"{src}: tensors do not fit the model: "
    assert [problem.reason.removeprefix(prefix) for problem in caught.value.problems] == [
        "1 missing: model.norm.weight",
        "1 unknown to the model: model.layers.0.self_attn.q_proj.bias",
        "1 different: model.embed_tokens.weight is (100, 64) instead of (128, 64)",
    ]
    assert same(shards, blank(shards))


def test_old_rotary_tables_are_ignored(tmp_path: Path) -> None:
    specs = table("gqa2", ALONE)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    HfFolder(export(tmp_path, {**tensors_of(specs), **extra})).check(specs.global_shapes())


def test_the_second_copy_of_a_tied_embedding_is_ignored_only_where_it_is_tied(tmp_path: Path) -> None:
    specs = table("tied", ALONE)
    tensors = tensors_of(specs)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    HfFolder(export(tmp_path, tensors, tie_word_embeddings=True)).check(specs.global_shapes())
    with pytest.raises(ConfigError, match=r"1 unknown to the model: lm_head\.weight"):
        HfFolder(export(tmp_path, tensors)).check(specs.global_shapes())


@pytest.mark.parametrize("row", [0, 70, 127])
def test_a_tied_head_with_values_of_its_own_is_refused(tmp_path: Path, row: int, monkeypatch: Any) -> None:
    """transformers computes with both matrices then, and a model that ties them would lose one in silence."""
    monkeypatch.setattr(hf_folder, "_COMPARED_ROWS", 50)
    specs = table("tied", ALONE)
    tensors = tensors_of(specs)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"][row, 3] += 0.25
    folder = HfFolder(export(tmp_path, tensors, tie_word_embeddings=True))
    with pytest.raises(ConfigError, match=r"tie_word_embeddings=true, but lm_head\.weight differs .* Set tie_word"):
        folder.check(specs.global_shapes())
    untied = {**specs.global_shapes(), "lm_head.weight": (128, 64)}
    folder.check(untied)  # a run may untie them


@pytest.mark.parametrize("keeps_shards", [False, True])
def test_a_single_weight_file_is_read_before_an_older_index(tmp_path: Path, keeps_shards: bool) -> None:
    """As transformers does, whose save_pretrained leaves the index of an earlier save in the folder."""
    src = export(tmp_path, {"a": torch.zeros(1), "b": torch.zeros(1)}, files=2)
    export(src, {"a": torch.ones(1), "b": torch.ones(1)})
    if not keeps_shards:
        for file in src.glob("part-*"):
            file.unlink()
    assert HfFolder(src).read("a").item() == 1
    assert model_folder._weights_of(src) == ["model.safetensors"]


def test_the_type_of_a_folder_holds_all_its_weights_exactly(tmp_path: Path) -> None:
    half = {"a": torch.zeros(1, dtype=torch.bfloat16)}
    assert HfFolder(export(tmp_path, half)).dtype == torch.bfloat16
    assert HfFolder(export(tmp_path, {**half, "b": torch.zeros(1, dtype=torch.float16)})).dtype == torch.float32
    rotary = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}  # float32 in exports of 2023
    assert HfFolder(export(tmp_path, {**half, **rotary})).dtype == torch.bfloat16


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="q is I8, but only weights of type F32, BF16, F16 can be read"):
        HfFolder(export(tmp_path, {"q": torch.zeros(1, dtype=torch.int8)}))


def test_a_folder_that_is_no_model_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*config\.json: No such file"):
        HfFolder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is not valid JSON"):
        HfFolder(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"lacks model\.safetensors; pickled weights"):
        HfFolder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(ConfigError, match=r"model\.safetensors is damaged"):
        HfFolder(tmp_path)


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    src = export(tmp_path, {"a": torch.zeros(1), "b": torch.zeros(1), "c": torch.zeros(1)}, files=3)
    (src / "part-1.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"lacks part-1\.safetensors"):
        HfFolder(src)


OUTSIDE = [
    "../secret.safetensors",
    "/etc/secret.safetensors",
    "sub/secret.safetensors",
    "..",
    ".",
    "",
    "a\\b",
    "\0",
    7,
]


@pytest.mark.parametrize("name", OUTSIDE, ids=repr)
def test_an_index_names_files_beside_it_and_no_others(tmp_path: Path, name: object) -> None:
    """Else a folder from anywhere would have any file of the machine read."""
    src = export(tmp_path / "hf", {"a": torch.zeros(1), "b": torch.zeros(1)}, files=2)
    for folder in (tmp_path, src / "sub"):
        folder.mkdir(exist_ok=True)
        save_file({"b": torch.ones(1)}, folder / "secret.safetensors")
    index = src / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {**places, "b": name}}))
    with pytest.raises(ConfigError) as refused:
        HfFolder(src)
    assert f"{index}" in str(refused.value)
    assert " b " in str(refused.value)
    assert repr(name) in str(refused.value)


def test_a_weight_file_may_be_a_link_as_in_the_cache_of_hugging_face(tmp_path: Path) -> None:
    src = export(tmp_path / "snapshot", {"a": torch.ones(1), "b": torch.zeros(1)}, files=2)
    (tmp_path / "blobs").mkdir()
    for file in src.glob("part-*"):
        file.rename(tmp_path / "blobs" / file.name)
        file.symlink_to(f"../blobs/{file.name}")
    assert HfFolder(src).read("a").item() == 1


@pytest.mark.parametrize("weight_map", [[], "x", 3, None])
def test_an_index_that_is_no_table_is_named(tmp_path: Path, weight_map: object) -> None:
    src = export(tmp_path, {"a": torch.zeros(1), "b": torch.zeros(1)}, files=2)
    (src / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConfigError, match='"weight_map" must be an object'):
        HfFolder(src)


@pytest.mark.parametrize("value", [{"quant_method": "fp8"}, {"bits": 4}, "gptq"])
def test_weights_of_a_quantization_are_refused_with_the_way_out(tmp_path: Path, value: object) -> None:
    src = export(tmp_path, {"a": torch.zeros(1)}, quantization_config=value)
    with pytest.raises(ConfigError, match=r"config\.json has a quantization_config .*model\.dequantize\(\)"):
        HfFolder(src)


@pytest.mark.parametrize("value", [None, {}])
def test_no_quantization_is_none(tmp_path: Path, value: object) -> None:
    HfFolder(export(tmp_path, {"a": torch.zeros(1)}, quantization_config=value))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tp", [1, 2])
def test_weights_that_are_not_finite_are_refused_by_each_rank_that_has_them(
    tmp_path: Path, tp: int, dtype: torch.dtype
) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in tensors_of(table("gqa2", ALONE)).items()}
    rows = tensors["model.embed_tokens.weight"]
    rows[0, 0], rows[1, 1], rows[-1, 3] = torch.nan, torch.inf, torch.nan
    tensors["model.norm.weight"][5] = -torch.inf
    src = export(tmp_path, tensors)
    for rank in range(tp):
        mesh = Mesh.build(tp, rank, tp=tp)
        specs = table("gqa2", mesh)
        fill = HfWeights(src, specs, mesh.tp, specs.global_shapes())
        for name, local in blank(cut(specs, mesh, WEIGHTS))["model"].items():
            fill(name, local)
        here = {1: ["2 NaN and 1 infinite"], 2: ["1 NaN and 1 infinite", "1 NaN"]}[tp][rank]
        with pytest.raises(InputError) as refused:
            fill.check()
        counts = f"model.embed_tokens.weight ({here}), model.norm.weight (1 infinite)"
        assert f"{src}: 2 tensors have values that are not finite: {counts}." in str(refused.value)


def test_a_value_that_the_type_of_the_model_cannot_hold_is_not_finite(tmp_path: Path) -> None:
    specs = table("gqa2", ALONE)
    tensors = tensors_of(specs)
    tensors["model.norm.weight"][0] = torch.finfo(torch.float32).max
    fill = HfWeights(export(tmp_path, tensors), specs, ALONE.tp, specs.global_shapes())
    for name, local in blank(cut(specs, ALONE, {"model": torch.bfloat16}))["model"].items():
        fill(name, local)
    with pytest.raises(InputError, match=r"model\.norm\.weight \(1 infinite\)"):
        fill.check()
