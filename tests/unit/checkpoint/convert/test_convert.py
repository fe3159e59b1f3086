"""Conversion against transformers: it loads what we write, we load what it writes, and nothing changes on the way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, models, trainers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from nxtrain.checkpoint import directory
from nxtrain.checkpoint.convert.hf import hf_to_nxtrain, nxtrain_to_hf
from nxtrain.checkpoint.meta import read_meta
from nxtrain.common.errors import CheckpointError, ConfigError, InputError
from nxtrain.common.mesh import Mesh
from nxtrain.common.sharding import Layout
from tests.support.commands import in_process
from tests.support.models import hf_model, plan, tokens
from tests.support.run_folders import cut, meta, save, table

ALONE = Mesh(1, 0)


def weights(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


def published(folder: Path, shape: str, dtype: torch.dtype = torch.float32, max_shard: str = "5GB") -> Path:
    hf_model(plan(shape)).to(dtype).save_pretrained(folder, max_shard_size=max_shard)
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", ["mha", "gqa", "mqa", "tied", "llama3-rope", "yarn-rope", "odd"])
def test_import_export_import_is_bitwise(tmp_path: Path, shape: str, dtype: torch.dtype) -> None:
    src = published(tmp_path / "hf", shape, dtype)
    hf_to_nxtrain(src, tmp_path / "first")
    nxtrain_to_hf(tmp_path / "first", tmp_path / "back")
    hf_to_nxtrain(tmp_path / "back", tmp_path / "second")
    nxtrain_to_hf(tmp_path / "second", tmp_path / "again")
    assert equal(weights(tmp_path / "back"), weights(src))
    assert equal(weights(tmp_path / "again"), weights(src))
    first, second = read_meta(tmp_path / "first"), read_meta(tmp_path / "second")
    assert (first.step, first.kinds, first.dtype) == (0, ("model",), str(dtype).removeprefix("torch."))
    assert first == second


ROLES = ("bos", "eos", "pad")


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_ids_of_special_tokens_come_back_from_a_folder_without_a_tokenizer(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("ids")
    src = published(folder / "hf", "gqa")
    one = st.integers(0, 63)
    ids = st.fixed_dictionaries(
        {}, optional={"bos": one, "pad": one, "eos": st.one_of(one, st.lists(one, min_size=1, max_size=3))}
    )
    config = json.loads((src / "config.json").read_text())
    for role in ROLES:
        config.pop(f"{role}_token_id", None)
    (src / "config.json").write_text(
        json.dumps(config | {f"{role}_token_id": value for role, value in data.draw(ids).items()})
    )
    if data.draw(st.booleans()):
        GenerationConfig(**{f"{role}_token_id": value for role, value in data.draw(ids).items()}).save_pretrained(src)
    else:
        (src / "generation_config.json").unlink(missing_ok=True)
    hf_to_nxtrain(src, folder / "ours")
    nxtrain_to_hf(folder / "ours", folder / "back")
    there, back = (
        (AutoConfig.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path).generation_config)
        for path in (src, folder / "back")
    )
    file = src / "generation_config.json"
    of_config = json.loads((src / "config.json").read_text())
    for key in (f"{role}_token_id" for role in ROLES):
        if of_config.get(key) is not None:  # transformers has defaults of its own for the others
            assert getattr(back[0], key) == getattr(there[0], key) == of_config[key]
        if file.exists() or of_config.get(key) is not None:
            assert getattr(back[1], key) == getattr(there[1], key)


@pytest.mark.parametrize("declared", [False, True])
def test_ids_of_special_tokens_come_back_beside_a_tokenizer(tmp_path: Path, declared: bool) -> None:
    """The names of its tokens give one id for each role at most, and none for names that nobody knows."""
    src = published(tmp_path / "hf", "gqa")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.add_special_tokens([AddedToken(name) for name in ("[END]", "[TURN]", "[BEGIN]", "<s>")])
    tokenizer.save(str(src / "tokenizer.json"))
    if declared:
        (src / "tokenizer_config.json").write_text(json.dumps({"eos_token": "[TURN]"}))
    ids = {"eos_token_id": [0, 1], "bos_token_id": 2, "pad_token_id": 0}
    of_text = {"eos_token_id": [1, 0], "bos_token_id": 2}
    config = json.loads((src / "config.json").read_text())
    (src / "config.json").write_text(json.dumps(config | ids))
    (src / "generation_config.json").write_text(json.dumps(of_text))
    hf_to_nxtrain(src, tmp_path / "ours")
    nxtrain_to_hf(tmp_path / "ours", tmp_path / "back")
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    assert {key: back[key] for key in ids} == ids
    assert json.loads((tmp_path / "back" / "generation_config.json").read_text()) == of_text


@pytest.mark.parametrize("shape", ["gqa", "tied", "llama3-rope"])
def test_transformers_computes_the_same_from_what_we_export(tmp_path: Path, shape: str) -> None:
    resolved = plan(shape)
    src = published(tmp_path / "hf", shape)
    hf_to_nxtrain(src, tmp_path / "ours")
    nxtrain_to_hf(tmp_path / "ours", tmp_path / "back", max_shard_bytes=60_000)
    assert len(list((tmp_path / "back").glob("model-*-of-*.safetensors"))) > 1
    batch = tokens(resolved, 2)
    original, ours = (
        transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        for folder in (src, tmp_path / "back")
    )
    assert ours.dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(original(input_ids=batch).logits, ours(input_ids=batch).logits)


def test_files_are_cut_at_the_limit_and_indexed(tmp_path: Path) -> None:
    hf_to_nxtrain(published(tmp_path / "hf", "gqa"), tmp_path / "ours")
    nxtrain_to_hf(tmp_path / "ours", tmp_path / "back", max_shard_bytes=60_000)
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    sizes = {
        file.name: sum(t.nbytes for t in load_file(file).values()) for file in (tmp_path / "back").glob("*.safetensors")
    }
    assert max(sizes.values()) <= 60_000
    assert index["metadata"]["total_size"] == sum(sizes.values())
    assert set(index["weight_map"].values()) == set(sizes)
    assert index["weight_map"].keys() == weights(tmp_path / "hf").keys()


def test_a_run_is_exported_with_its_newest_weights_and_its_tokenizer(tmp_path: Path) -> None:
    resolved = plan("gqa")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.train_from_iterator(["ab abc"], trainers.BpeTrainer(special_tokens=["<|endoftext|>"]))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    specs = table("gqa", ALONE)
    for step in (1, 2):
        shards = cut(specs, ALONE)
        shards["model"]["model.norm.weight"].fill_(float(step))
        state = meta(step, config=resolved.model.model_dump(mode="json"))
        path = directory.step_path(tmp_path / "run" / "checkpoints", step)
        save(path, shards, Layout(specs, ALONE), state, tokenizer=tmp_path / "tokenizer.json")
    nxtrain_to_hf(tmp_path / "run", tmp_path / "hf")
    exported = weights(tmp_path / "hf")
    assert bool((exported["model.norm.weight"] == 2).all())
    assert exported.keys() == specs.global_shapes().keys()
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert (loaded.eos_token, loaded.eos_token_id) == ("<|endoftext|>", 0)
    assert loaded("abc")["input_ids"] == tokenizer.encode("abc").ids
    config = transformers.AutoConfig.from_pretrained(tmp_path / "hf")
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "hf")
    assert (config.bos_token_id, config.eos_token_id, generation.eos_token_id) == (None, 0, 0)


def test_a_link_as_target_stands_for_its_folder(tmp_path: Path) -> None:
    """It may be on another disk, since this one has no room."""
    src, disk = published(tmp_path / "hf", "gqa"), tmp_path / "disk"
    for name in ("ours", "back", "new"):
        (tmp_path / name).symlink_to(disk / name)
    for name in ("ours", "back"):
        (disk / name).mkdir(parents=True)
    assert in_process("convert", "hf-to-nxtrain", src, tmp_path / "ours")[0] == 0
    for name in ("back", "new"):
        assert in_process("convert", "nxtrain-to-hf", tmp_path / "ours", tmp_path / name)[0] == 0
    assert {path.name for path in disk.iterdir()} == {"ours", "back", "new"}
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "disk", "ours", "back", "new"}
    assert all((tmp_path / name).is_symlink() for name in ("ours", "back", "new"))


def test_a_wrong_folder_makes_no_checkpoint(tmp_path: Path) -> None:
    src = published(tmp_path / "hf", "gqa")
    tensors = weights(src)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, src / "model.safetensors")
    with pytest.raises(ConfigError, match=r"1 missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        hf_to_nxtrain(src, tmp_path / "ours")
    config = json.loads((src / "config.json").read_text())
    (src / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    with pytest.raises(ConfigError, match="no model family 'gpt2' is installed"):
        hf_to_nxtrain(src, tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_conversion_replaces_its_own_output_and_nothing_else(tmp_path: Path) -> None:
    src = published(tmp_path / "hf", "gqa")
    for _ in range(2):
        hf_to_nxtrain(src, tmp_path / "ours")
        nxtrain_to_hf(tmp_path / "ours", tmp_path / "back")
    for folder in (tmp_path / "ours", tmp_path / "back"):
        (folder / "notes.txt").touch()
    with pytest.raises(ConfigError, match=r"ours exists and holds notes\.txt"):
        hf_to_nxtrain(src, tmp_path / "ours")
    with pytest.raises(ConfigError, match=r"back exists and holds notes\.txt"):
        nxtrain_to_hf(tmp_path / "ours", tmp_path / "back")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "hf", "ours"]


def test_a_torn_checkpoint_makes_no_export(tmp_path: Path) -> None:
    hf_to_nxtrain(published(tmp_path / "hf", "gqa"), tmp_path / "ours")
    for file in (tmp_path / "ours").glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors is damaged: it has 100 bytes instead of"):
        nxtrain_to_hf(tmp_path / "ours", tmp_path / "back")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "ours"]


@pytest.mark.parametrize("is_there", [False, True])
def test_weights_that_are_not_finite_are_named_and_no_checkpoint_is_made(tmp_path: Path, is_there: bool) -> None:
    src = published(tmp_path / "hf", "gqa")
    if is_there:
        hf_to_nxtrain(src, tmp_path / "ours")
    before = {path.name: path.read_bytes() for path in (tmp_path / "ours").glob("*")}
    file = src / "model.safetensors"
    spoilt = load_file(file)
    spoilt["model.norm.weight"][:3] = torch.nan
    spoilt["model.layers.1.mlp.up_proj.weight"][2, 2] = torch.inf
    save_file(spoilt, file, {"format": "pt"})
    with pytest.raises(InputError) as refused:
        hf_to_nxtrain(src, tmp_path / "ours")
    assert "2 tensors have values that are not finite" in str(refused.value)
    assert "model.norm.weight (3 NaN)" in str(refused.value)
    assert "model.layers.1.mlp.up_proj.weight (1 infinite)" in str(refused.value)
    assert {path.name: path.read_bytes() for path in (tmp_path / "ours").glob("*")} == before
    assert {path.name for path in tmp_path.iterdir()} == {"hf", *(["ours"] if is_there else [])}
