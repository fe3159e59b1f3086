"""Rank files of NeuronX Distributed, written and read by us; `tests/device/test_nxd_checkpoint.py` has NxD's own side.

The reference of every round trip is the checkpoint that it began with, bit for bit.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from nxtrain.checkpoint.convert.nxd_files import Grid
from nxtrain.checkpoint.convert.nxd_layout import NxdLayout
from nxtrain.checkpoint.convert.nxd_read import nxd_to_nxtrain
from nxtrain.checkpoint.convert.nxd_write import NxdTarget, OptimizerSettings, nxtrain_to_nxd
from nxtrain.checkpoint.load import load
from nxtrain.checkpoint.meta import Meta, read_meta
from nxtrain.common.errors import CheckpointError, ConfigError
from nxtrain.common.mesh import Mesh
from nxtrain.common.sharding import Layout
from nxtrain.config.schema import OptimConfig
from tests.support.models import plan
from tests.support.run_folders import blank, cut, meta, same, save, table, whole

ALONE = Mesh(1, 0)
WIDE = {"model": torch.float32, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}
MASTERED = {**WIDE, "model": torch.bfloat16, "master": torch.float32}
RATES = OptimizerSettings(OptimConfig(lr=1e-3, weight_decay=0.1), lr=5e-4)


def saved(folder: Path, shape: str, kinds: Mapping[str, torch.dtype], about: Any = None, **config: Any) -> Path:
    """A checkpoint at step 10 of known tensors."""
    values = plan(shape, model={"config": config}).model.model_dump(mode="json")
    info = meta(config=values, dtype=str(kinds["model"]).removeprefix("torch."), data_fingerprint="d")
    info = info.model_copy(update=about or {})
    layout = Layout(table(shape, ALONE, config=config), ALONE)
    save(folder / "ours", cut(layout.table, ALONE, kinds), layout, info)
    return folder / "ours"


def equal(a: Path, b: Path, shape: str, kinds: Mapping[str, torch.dtype], **config: Any) -> bool:
    layout = Layout(table(shape, ALONE, config=config), ALONE)
    result = [blank(cut(layout.table, ALONE, kinds)) for _ in (a, b)]
    for folder, shards in zip((a, b), result, strict=True):
        load(folder, shards, layout)
    return same(*result) and same(result[0], cut(layout.table, ALONE, kinds))


def there_and_back(folder: Path, src: Path, target: NxdTarget) -> tuple[Path, Meta]:
    tag = nxtrain_to_nxd(src, folder / "nxd", target, rates=RATES)
    assert tag == folder / "nxd/step_10"
    return folder / "back", nxd_to_nxtrain(folder / "nxd", folder / "back")


FILLED: dict[str, Any] = {
    "samples": 70,
    "tokens": 700,
    "seed": 3,
    "global_batch": 8,
    "batch_ramp": ({"steps": 2, "size": 4},),
    "seq_ramp": ({"steps": 1, "size": 8},),
    "data_cursor": {"places": [[1, 2, 3], [4, 5, 6]]},
    "loss_scale": {"scale": 512.0, "steps": 3.0, "num_updates": 8.0},
    "rewarm_after": 4,
    "stability": {"norms": [0.5, 1.5], "steps": [1]},
    "settings": {"optim.lr": 1e-3, "optim.betas": [0.9, 0.95]},
    "shuffle": True,
    "data_fingerprint": "d",
    "tokenizer_fingerprint": "t",
    "end_of_text": "</s>",
    "config_fingerprint": "c",
    "code_fingerprint": "e",
}


def test_all_that_a_run_needs_to_go_on_comes_back(tmp_path: Path) -> None:
    """Its position in packed documents is not a number of samples; without it, the data would begin anew."""
    of_tensors = {"manifest_crc32", "mesh", "kinds", "format", "family", "config", "dtype", "state_dtype", "step"}
    of_adapters = {"adapter", "base", "base_fingerprint"}
    assert FILLED.keys() == Meta.model_fields.keys() - of_tensors - of_adapters, "a new field needs its value here"
    src = saved(tmp_path, "gqa", WIDE, about=FILLED)
    _, back = there_and_back(tmp_path, src, NxdTarget(tp=2))
    assert {name: getattr(back, name) for name in FILLED} == FILLED


@pytest.mark.parametrize(
    ("shape", "target"),
    [
        ("gqa", NxdTarget()),
        ("gqa", NxdTarget(tp=2, pp=2)),
        ("gqa", NxdTarget(tp=4, dp=2)),
        ("gqa", NxdTarget(tp=8)),  # each K/V head on two ranks
        ("gqa", NxdTarget(tp=8, platform="trn2", qkv="fused")),
        ("gqa2", NxdTarget(tp=4, copies=4, qkv="fused", dp=2)),  # two heads on each rank, equal on trn2
        ("gqa2", NxdTarget(tp=4, copies=4, platform="trn2")),
        ("gqa2", NxdTarget(tp=4, copies=2, platform="trn2", pp=2, dp=2)),
        ("mqa", NxdTarget(tp=4, dp=3)),
        ("mha", NxdTarget(tp=2, qkv="fused")),
        ("tied", NxdTarget(tp=2, dp=2)),
        ("tied", NxdTarget(tp=2, pp=2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("kinds", [WIDE, MASTERED], ids=["fp32", "bf16"])
def test_the_way_there_and_back_changes_no_bit(
    tmp_path: Path, shape: str, target: NxdTarget, kinds: Mapping[str, torch.dtype]
) -> None:
    src = saved(tmp_path, shape, kinds)
    back, result = there_and_back(tmp_path, src, target)
    assert equal(src, back, shape, kinds)
    before = read_meta(src)
    if shape == "mha":  # as many K/V heads as query heads, which then goes without saying
        before = before.model_copy(update={"config": {**before.config, "num_key_value_heads": None}})
    degrees = {"tp": target.tp or 1, "pp": target.pp or 1, "dp": target.dp or 1}
    assert (
        result
        == read_meta(back)
        == before.model_copy(update={"mesh": degrees, "kinds": result.kinds, "manifest_crc32": result.manifest_crc32})
    )
    assert set(result.kinds) == set(before.kinds)


@pytest.mark.parametrize("dp", [3, 5, 8])
def test_rows_that_do_not_divide_over_dp_are_padded(tmp_path: Path, dp: int) -> None:
    sizes = {"hidden_size": 72, "num_attention_heads": 12, "intermediate_size": 100, "vocab_size": 130}
    src = saved(tmp_path, "gqa2", MASTERED, **sizes)
    back, _ = there_and_back(tmp_path, src, NxdTarget(tp=2, dp=dp))
    assert equal(src, back, "gqa2", MASTERED, **sizes)
    file = torch.load(tmp_path / f"nxd/step_10/optim/dp_rank_{dp - 1:02d}_tp_rank_01_pp_rank_00.pt", weights_only=True)
    rows = -(-65 // dp)
    assert file["base_state"][0]["exp_avg"].shape == (rows, 72)
    assert file["shape_info"][0] == (65, 72)
    padding = rows * dp - 65
    assert not file["sharded_master_weights"][0][rows - padding :].any()


def test_without_zero1_a_file_has_all_rows(tmp_path: Path) -> None:
    src = saved(tmp_path, "gqa", WIDE)
    back, result = there_and_back(tmp_path, src, NxdTarget(tp=2, dp=4, zero1=False))
    assert equal(src, back, "gqa", WIDE)
    assert result.mesh == {"tp": 2, "pp": 1, "dp": 1}
    names = [file.name for file in sorted((tmp_path / "nxd/step_10/optim").iterdir())]
    assert names == ["dp_rank_00_tp_rank_00_pp_rank_00.pt", "dp_rank_00_tp_rank_01_pp_rank_00.pt"]


@pytest.mark.parametrize("decay_norms", [True, False])
def test_the_optimizer_gets_the_groups_of_the_run(tmp_path: Path, decay_norms: bool) -> None:
    src = saved(tmp_path, "gqa", WIDE)
    rates = OptimizerSettings(RATES.optim.model_copy(update={"decay_norms": decay_norms}), lr=5e-4)
    tag = nxtrain_to_nxd(src, tmp_path / "nxd", NxdTarget(), rates=rates)
    state = torch.load(tag / "optim/dp_rank_00_tp_rank_00_pp_rank_00.pt", weights_only=True)
    sizes = [len(group["params"]) for group in state["param_groups"]]
    assert sizes == ([19, 0] if decay_norms else [14, 5])  # 2 x 7 parameters, and 5 norms with the last
    assert [(g["lr"], g["initial_lr"], g["weight_decay"]) for g in state["param_groups"]] == [
        (5e-4, 1e-3, 0.1),
        (5e-4, 1e-3, 0.0),
    ]
    nxd_to_nxtrain(tag, tmp_path / "back")
    assert equal(src, tmp_path / "back", "gqa", WIDE)


def test_a_rank_has_what_nxds_llama_has_there(tmp_path: Path) -> None:
    """Names and order as NxD 0.18 saved them of its example, and its slices by hand."""
    tag = nxtrain_to_nxd(saved(tmp_path, "gqa", WIDE), tmp_path / "nxd", NxdTarget(tp=2, dp=2), rates=RATES)
    weights = torch.load(tag / "model/dp_rank_00_tp_rank_01_pp_rank_00.pt", weights_only=True)
    block = [
        *("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.o_proj.weight"),
        *(
            "mlp.gate_up_proj.weight",
            "mlp.down_proj.weight",
            "input_layernorm.weight",
            "post_attention_layernorm.weight",
        ),
    ]
    blocks = [f"model.layers.{number}.{name}" for number in (0, 1) for name in block]
    assert list(weights) == ["model.embed_tokens.weight", *blocks, "model.norm.weight", "lm_head.weight"]
    layer = "model.layers.1"

    def whole_of(kind: str, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return whole(f"{kind}/{layer}.{name}.weight", shape, torch.float32)

    gate, up = (whole_of("model", f"mlp.{name}_proj", (96, 64)) for name in ("gate", "up"))
    assert torch.equal(weights[f"{layer}.mlp.gate_up_proj.weight"], torch.cat([gate[48:], up[48:]]))
    down = whole_of("model", "mlp.down_proj", (64, 96))
    assert torch.equal(weights[f"{layer}.mlp.down_proj.weight"], down[:, 48:])
    state = torch.load(tag / "optim/dp_rank_01_tp_rank_01_pp_rank_00.pt", weights_only=True)["base_state"]
    # Seven matrices before those of this layer; then, after the head's, norms.
    assert torch.equal(state[7]["exp_avg"], whole_of("exp_avg", "self_attn.q_proj", (64, 64))[48:])
    assert torch.equal(state[12]["exp_avg_sq"], whole_of("exp_avg_sq", "mlp.down_proj", (64, 96))[32:, 48:])
    assert torch.equal(state[16]["exp_avg"], whole_of("exp_avg", "input_layernorm", (64,))[32:])
    assert state[16]["step"] == 10


def test_copied_heads_lie_as_on_the_platform(tmp_path: Path) -> None:
    """Two K/V heads of four queries each, on four ranks: by hand."""
    shapes = {
        f"model.layers.0.self_attn.{name}.weight": (size, 64)
        for name, size in (("q_proj", 64), ("k_proj", 16), ("v_proj", 16))
    }
    config = {
        **{"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64, "num_hidden_layers": 1},
        **{"intermediate_size": 96, "vocab_size": 128},
    }

    def heads(name: str, platform: Any) -> list[list[int]]:
        layout = NxdLayout(shapes, config, tp=4, copies=2, qkv="grouped", platform=platform)
        params = [layout.param(f"model.layers.0.self_attn.qkv_proj.{name}", rank) for rank in range(4)]
        return [[block.offsets[0] // 8 for _, block in param.blocks] for param in params]

    assert heads("weight_k", "trn1") == [[0], [1], [0], [1]]
    assert heads("weight_k", "trn2") == [[0], [0], [1], [1]]
    assert heads("weight_q", "trn1") == [[0], [4], [2], [6]]  # two queries each, from these on
    assert heads("weight_q", "trn2") == [[0], [2], [4], [6]]


def test_what_nxd_continued_begins_its_data_anew(tmp_path: Path) -> None:
    tag = nxtrain_to_nxd(saved(tmp_path, "gqa", MASTERED), tmp_path / "nxd", NxdTarget(), rates=RATES)
    torch.save({"total_steps": 12, "cli_args": {}}, tag / "user_content.pt")
    result = nxd_to_nxtrain(tag, tmp_path / "back")
    assert (result.step, result.samples, result.tokens, result.data_fingerprint) == (10, 0, 0, "")
    assert result.kinds == ("model", "exp_avg", "exp_avg_sq", "master")


def test_weights_alone_are_a_start_at_step_0(tmp_path: Path) -> None:
    src = saved(tmp_path, "gqa", {**WIDE, "compensation": torch.bfloat16})
    tag = nxtrain_to_nxd(src, tmp_path / "nxd", NxdTarget(tp=2), rates=None)
    assert sorted(file.name for file in tag.iterdir()) == [
        "checkpoint",
        "config.json",
        "done",
        "model",
        "user_content.pt",
    ]
    result = nxd_to_nxtrain(tag, tmp_path / "back")
    assert (result.step, result.kinds) == (0, ("model",))
    assert equal(src, tmp_path / "back", "gqa", {"model": torch.float32})


@pytest.mark.parametrize(
    ("shape", "kinds", "target", "words"),
    [
        ("odd", WIDE, NxdTarget(tp=2), "tp=2 does not divide intermediate_size=89"),
        ("odd", WIDE, NxdTarget(tp=2), "tp=2 does not divide vocab_size=131"),
        ("gqa", WIDE, NxdTarget(tp=3), "tp=3 does not divide num_attention_heads=8"),
        ("gqa", WIDE, NxdTarget(pp=3), "pp=3 stages exceed the 2 blocks"),
        ("gqa", WIDE, NxdTarget(tp=8, copies=2, qkv="separate"), "need qkv=grouped or fused"),
        ("gqa", WIDE, NxdTarget(tp=2, copies=4), "4 copies of 4 K/V heads do not divide 8 query heads"),
        (
            "gqa",
            {**WIDE, "compensation": torch.bfloat16},
            NxdTarget(),
            "optimizer state compensation, which NeuronX Distributed does not support",
        ),
        ("gqa", {"model": torch.float32}, NxdTarget(), "no exp_avg and exp_avg_sq"),
        ("gqa", MASTERED, NxdTarget(zero1=False), "keeps float32 master weights with ZeRO-1 only"),
    ],
)
def test_what_nxd_has_no_place_for_is_refused(
    tmp_path: Path, shape: str, kinds: Mapping[str, torch.dtype], target: NxdTarget, words: str
) -> None:
    src = saved(tmp_path, shape, kinds)
    with pytest.raises(ConfigError, match=words) as refusal:
        nxtrain_to_nxd(src, tmp_path / "nxd", target, rates=RATES)
    assert not any(problem.hint.startswith("or ") for problem in refusal.value.problems), "a hint is a sentence"
    assert not (tmp_path / "nxd").exists()


def changed(file: Path, change: Any) -> None:
    content = torch.load(file, weights_only=True)
    change(content)
    torch.save(content, file)


def emptied(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / ".metadata").touch()


FIRST = "dp_rank_00_tp_rank_00_pp_rank_00.pt"


@pytest.fixture(scope="module")
def on_eight_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a sound checkpoint of NxD, of which a test damages a copy."""
    folder = tmp_path_factory.mktemp("sound")
    src = saved(folder, "gqa", WIDE)
    nxtrain_to_nxd(src, folder / "nxd", NxdTarget(tp=8, qkv="grouped"), rates=RATES)
    return folder / "nxd"


def damage(tag: Path, how: str) -> None:
    model, optim = tag / "model" / FIRST, tag / "optim" / FIRST
    k_proj = "model.layers.0.self_attn.qkv_proj.weight_k"
    damages: dict[str, Any] = {
        "unfinished": (tag / "done").unlink,
        "lost": (tag / "model/dp_rank_00_tp_rank_05_pp_rank_00.pt").unlink,
        "torn": lambda: model.write_bytes(model.read_bytes()[:1000]),
        "experts": lambda: shutil.copy(model, model.with_name("dp_rank_00_ep_rank_00_tp_rank_00_pp_rank_00.pt")),
        "config": (tag / "config.json").unlink,
        "shape": lambda: (tag / "config.json").write_text(
            json.dumps({**json.loads((tag / "config.json").read_text()), "intermediate_size": 64})
        ),
        "unknown": lambda: changed(model, lambda x: x.update({"model.layers.0.mlp.router.weight": torch.ones(2)})),
        "missing": lambda: changed(model, lambda x: x.pop("model.norm.weight")),
        "copies": lambda: changed(model, lambda x: x[k_proj].mul_(2)),
        "groups": lambda: changed(optim, lambda x: x["param_groups"][0]["params"].pop()),
        "order": lambda: changed(optim, lambda x: x["param_groups"][0]["params"].reverse()),
        "steps": lambda: changed(optim, lambda x: x["base_state"][3].update(step=torch.tensor(9.0))),
        "sgd": lambda: changed(optim, lambda x: x["base_state"].update({k: {} for k in x["base_state"]})),
        "dcp": lambda: emptied(tag / "optim"),
        "code": lambda: torch.save({"model.norm.weight": Path("x")}, model),
    }
    damages[how]()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("unfinished", "is incomplete: NeuronX Distributed did not write done"),
        ("lost", "lacks 1 of 8 rank files, such as dp_rank_00_tp_rank_05_pp_rank_00.pt"),
        ("torn", "cannot read .*dp_rank_00_tp_rank_00_pp_rank_00.pt: "),
        ("experts", "is not a rank file of a Llama model; experts are not supported"),
        ("config", "no config.json in .* or its parent folder.*--config FILE"),
        ("shape", r"different: .*gate_up_proj.weight is float32 \(24, 64\) instead of float32 \(16, 64\)"),
        ("unknown", "1 unknown to the model: model.layers.0.mlp.router.weight"),
        ("missing", "1 missing: model.norm.weight"),
        ("copies", "differ between ranks, both in the head order of trn1 and of trn2"),
        ("groups", r"groups of 13, 5 parameters, .*the 14 matrices .*--weights-only"),
        ("order", r"entry \d+ of pipeline stage 0 is not the state of .*--weights-only"),
        ("steps", r"had different numbers of updates: \[9, 10\]"),
        ("sgd", "holds no AdamW state"),
        ("dcp", "was saved with use_zero1_dcp.*--weights-only"),
        ("code", "cannot read .*Weights only load failed"),
    ],
)
def test_what_is_damaged_or_strange_is_refused_with_its_name(
    on_eight_ranks: Path, tmp_path: Path, how: str, words: str
) -> None:
    shutil.copytree(on_eight_ranks, tmp_path / "nxd")
    tag = tmp_path / "nxd/step_10"
    damage(tag, how)
    with pytest.raises((CheckpointError, ConfigError)) as raised:
        nxd_to_nxtrain(tag, tmp_path / "back")
    assert re.search(words, str(raised.value)), raised.value
    assert not (tmp_path / "back").exists()


def test_of_norms_that_differ_the_first_is_taken_if_asked_for(tmp_path: Path) -> None:
    src = saved(tmp_path, "gqa", WIDE)
    tag = nxtrain_to_nxd(src, tmp_path / "nxd", NxdTarget(tp=2), rates=RATES)
    changed(tag / "model/dp_rank_00_tp_rank_01_pp_rank_00.pt", lambda x: x["model.norm.weight"].add_(0.25))
    words = "replicas of model/model.norm.weight differ between ranks, by up to 0.25 .*--first-copy"
    with pytest.raises(CheckpointError, match=words):
        nxd_to_nxtrain(tag, tmp_path / "back")
    nxd_to_nxtrain(tag, tmp_path / "back", first_copy=True)
    assert equal(src, tmp_path / "back", "gqa", WIDE)


def test_of_several_tags_the_last_finished_is_taken(tmp_path: Path) -> None:
    src = saved(tmp_path, "gqa", WIDE)
    tag = nxtrain_to_nxd(src, tmp_path / "nxd", NxdTarget(), rates=RATES)
    shutil.copytree(tag, tag.with_name("step_20"))
    (tag.with_name("step_20") / "done").unlink()
    assert nxd_to_nxtrain(tmp_path / "nxd", tmp_path / "back").step == 10
    with pytest.raises(CheckpointError, match="contains no finished checkpoint of NeuronX Distributed"):
        nxd_to_nxtrain(tmp_path, tmp_path / "again")


def test_a_folder_of_somebody_elses_is_not_written_over(tmp_path: Path) -> None:
    src = saved(tmp_path, "gqa", WIDE)
    nxtrain_to_nxd(src, tmp_path / "nxd", NxdTarget(tp=2), rates=RATES)
    nxtrain_to_nxd(src, tmp_path / "nxd", NxdTarget(), rates=RATES)  # a conversion's own
    assert len(list((tmp_path / "nxd/step_10/model").iterdir())) == 1
    (tmp_path / "nxd/step_10/notes.txt").touch()
    with pytest.raises(ConfigError, match=r"holds notes\.txt, which no conversion wrote"):
        nxtrain_to_nxd(src, tmp_path / "nxd", NxdTarget(), rates=RATES)


def test_a_folder_without_files_is_refused_as_such(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no rank file, such as dp_rank_"):
        Grid.of(tmp_path)
