"""Values that cannot run together are refused, all at once, with the arithmetic and the values that would work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nxtrain.checkpoint.convert.hf_folder import read_object
from nxtrain.common.errors import ConfigError, Problem
from nxtrain.config.check import Resolved, resolve_config, resolve_model
from nxtrain.config.load import load
from nxtrain.config.schema import RunConfig

HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG), encoding="utf-8")
    return tmp_path


def checked(tmp_path: Path, *overrides: str, world: int | None = None) -> Resolved:
    path = tmp_path / "run.toml"
    path.touch()
    return resolve_config(load(path, overrides), world)


def problems(tmp_path: Path, *overrides: str, world: int | None = None) -> list[Problem]:
    with pytest.raises(ConfigError) as raised:
        checked(tmp_path, *overrides, world=world)
    return list(raised.value.problems)


def only(tmp_path: Path, *overrides: str, world: int | None = None) -> Problem:
    (problem,) = problems(tmp_path, *overrides, world=world)
    return problem


def test_the_defaults_run(tmp_path: Path) -> None:
    resolved = checked(tmp_path, world=1)
    assert resolved.config == RunConfig()
    assert resolved.model == resolved.family.preset("tiny")


def test_global_batch_is_whole_micro_batches(tmp_path: Path) -> None:
    found = only(tmp_path, "train.global_batch=12", "train.micro_batch=4", "parallel.dp=2")
    assert found == Problem(
        "train.global_batch",
        "12 is not a multiple of micro_batch=4 x dp=2 = 8",
        "override",
        "use train.global_batch=8 or 16, or train.micro_batch among 1, 2, 3, 6",
    )


@pytest.mark.parametrize("steps", ["[5]", "[5,4]", "[1,101]", "[1,2,3]"])
def test_a_profile_has_a_first_and_a_last_step(tmp_path: Path, steps: str) -> None:
    found = only(tmp_path, f"metrics.profile_steps={steps}")
    assert found.key == "metrics.profile_steps"
    assert "is not the first and the last of at most 100 steps" in found.reason
    checked(tmp_path, f"metrics.profile_steps={found.hint.removeprefix('use such as ')}")


@pytest.mark.parametrize("fix", ["train.global_batch=8", "train.global_batch=16", "train.micro_batch=6"])
def test_the_batches_that_the_hint_names_work(tmp_path: Path, fix: str) -> None:
    checked(tmp_path, "train.global_batch=12", "train.micro_batch=4", "parallel.dp=2", fix)


def test_dp_follows_from_the_world(tmp_path: Path) -> None:
    overrides = ("parallel.tp=2", "train.global_batch=6", "train.micro_batch=3")
    checked(tmp_path, *overrides, world=4)
    found = only(tmp_path, *overrides, world=8)
    assert found.reason == "6 is not a multiple of micro_batch=3 x dp=4 = 12"
    assert found.hint == "use train.global_batch=12"


def test_sequence_parallelism_cuts_whole_tokens(tmp_path: Path) -> None:
    overrides = ("parallel.tp=4", "train.seq_len=130")
    checked(tmp_path, *overrides)
    found = only(tmp_path, *overrides, "parallel.sequence_parallel=true")
    assert found.key == "train.seq_len"
    assert found.reason == "tp=4 does not divide seq_len=130, as sequence_parallel asks"
    assert found.hint == "use train.seq_len=128 or 132, or parallel.sequence_parallel=false"


def test_heads_that_tp_does_not_divide_are_refused_by_the_family(tmp_path: Path) -> None:
    found = only(tmp_path, "parallel.tp=3")
    assert (found.key, found.origin) == ("parallel.tp", "override")
    assert found.reason == "tp=3 does not divide model.config.num_attention_heads=4"


def test_the_degrees_multiply_to_the_world(tmp_path: Path) -> None:
    assert only(tmp_path, "parallel.tp=2", world=3).key == "parallel.tp"
    found = only(tmp_path, "parallel.pp=2", world=3)
    assert (found.key, found.origin) == ("parallel.pp", "override")
    assert only(tmp_path, "parallel.dp=2", world=4).reason == "tp=1 x pp=1 x dp=2 = 2 ranks, but the world has 4"


def test_all_rules_are_checked_at_once(tmp_path: Path) -> None:
    found = problems(
        tmp_path,
        "parallel.tp=3",
        "data.packing=best_fit",
        "train.global_batch=3",
        "train.micro_batch=2",
        "optim.min_lr=1",
        "model.init=hf",
        "data.source=text",
        world=4,
    )
    assert [(problem.key, problem.origin) for problem in found] == [
        ("model.init", "override"),
        ("train.global_batch", "override"),
        ("optim.min_lr", "override"),
        ("data.path", "default"),
        ("data.packing", "override"),
        ("parallel.tp", "override"),  # heads
        ("parallel.tp", "override"),  # world
    ]


@pytest.mark.parametrize(
    ("params", "update", "hint"),
    [
        ("fp32", "fp32", None),
        ("bf16", "fp32_master", None),
        ("bf16", "bf16_stochastic", None),
        ("bf16", "bf16_kahan", None),
        ("fp32", "fp32_master", "use fp32"),
        ("bf16", "fp32", "use fp32_master or bf16_stochastic or bf16_kahan"),
    ],
)
def test_the_update_rule_fits_the_parameters(tmp_path: Path, params: str, update: str, hint: str | None) -> None:
    overrides = (f"precision.params={params}", f"precision.update={update}")
    if hint is None:
        checked(tmp_path, *overrides)
    else:
        assert only(tmp_path, *overrides).hint == hint


BF16 = ("precision.params=bf16", "precision.update=bf16_kahan")


@pytest.mark.parametrize("update", ["fp32_master", "bf16_kahan"])
def test_a_running_mean_that_rounding_to_nearest_would_freeze_is_refused(tmp_path: Path, update: str) -> None:
    overrides = ("precision.params=bf16", f"precision.update={update}", "precision.state=bf16")
    assert "optim.betas[0]=0.999" in only(tmp_path, *overrides, "optim.betas=[0.999, 0.95]").reason
    found = only(tmp_path, *overrides, "optim.betas=[0.9, 0.999]")
    assert found.key == "precision.state"
    assert "optim.betas[1]=0.999" in found.reason
    assert found.hint == "use precision.state=fp32, update=bf16_stochastic, or optim.betas[1]=0.99 or less"
    checked(tmp_path, *overrides, "optim.betas=[0.9, 0.99]")
    rounded_at_random = ("precision.params=bf16", "precision.update=bf16_stochastic", "precision.state=bf16")
    checked(tmp_path, *rounded_at_random, "optim.betas=[0.9, 0.999]")


def test_sums_are_no_narrower_than_the_gradients(tmp_path: Path) -> None:
    assert only(tmp_path, "precision.accumulate=bf16").hint == "use precision.accumulate=fp32"
    checked(tmp_path, *BF16, "precision.accumulate=bf16")
    checked(tmp_path, "precision.reduce=bf16")


@pytest.mark.parametrize("shard", ["grad_op", "full", "hybrid"])
def test_sharded_gradients_are_summed_in_the_type_they_are_reduced_in(tmp_path: Path, shard: str) -> None:
    found = only(tmp_path, *BF16, f"parallel.shard={shard}", "precision.reduce=bf16")
    assert (found.key, found.hint) == ("precision.accumulate", "use precision.accumulate=bf16")
    checked(tmp_path, *BF16, f"parallel.shard={shard}", "precision.reduce=bf16", "precision.accumulate=bf16")
    checked(tmp_path, *BF16, "parallel.shard=zero1", "precision.reduce=bf16")
    if shard == "hybrid":  # across nodes sums are kept in the type of the reduction
        assert only(tmp_path, "parallel.shard=hybrid", "precision.reduce=bf16").hint == "use precision.reduce=fp32"
    else:
        checked(tmp_path, f"parallel.shard={shard}", "precision.reduce=bf16")  # fp32 gradients are summed in fp32


def test_options_of_sharding_belong_to_the_modes_that_have_them(tmp_path: Path) -> None:
    found = only(tmp_path, "parallel.shard=full", "parallel.shard_size=2")
    assert (found.key, found.hint) == ("parallel.shard_size", "use parallel.shard_size=0, or parallel.shard=hybrid")
    assert only(tmp_path, "parallel.shard=zero1", "parallel.offload=true").key == "parallel.offload"
    assert only(tmp_path, "parallel.shard=zero1", "parallel.prefetch=2").key == "parallel.prefetch"
    assert only(tmp_path, "parallel.shard=full", "parallel.offload=true", "parallel.dp=1").key == "parallel.offload"
    found = only(tmp_path, "parallel.shard=hybrid", "parallel.shard_size=3", "parallel.dp=4")
    assert (found.key, found.reason, found.hint) == (
        "parallel.shard_size",
        "3 does not divide dp=4",
        "use one of 1, 2, 4",
    )
    checked(tmp_path, "parallel.shard=hybrid", "parallel.shard_size=2", "parallel.offload=true", world=4)
    found = only(tmp_path, "parallel.shard=hybrid", "parallel.shard_size=3", world=4)
    assert (found.key, found.reason) == ("parallel.shard_size", "3 does not divide dp=4")


def test_fully_sharded_parameters_need_process_groups(tmp_path: Path) -> None:
    found = only(tmp_path, "parallel.shard=full", "backend.name=xla")
    assert found.reason == "full runs on the backends cpu, cuda and neuron-native, not on xla"
    checked(tmp_path, "parallel.shard=zero1", "backend.name=xla")
    checked(tmp_path, "parallel.shard=full", "backend.name=neuron-native")


@pytest.mark.parametrize("name", ["xla", "neuron"])
def test_a_device_that_compiles_whole_steps_has_no_blocks_to_compile(tmp_path: Path, name: str) -> None:
    found = only(tmp_path, "compile.torch_compile=true", f"backend.name={name}")
    assert found.key == "compile.torch_compile"
    assert found.reason == f"backend.name={name} records whole steps, and its own compiler gets them"
    checked(tmp_path, "compile.torch_compile=true", "backend.name=neuron-native")


def test_a_path_without_a_source_is_not_ignored(tmp_path: Path) -> None:
    assert only(tmp_path, "data.path=x").key == "data.source"
    checked(tmp_path, "data.path=x", "data.source=stdlib")


def test_evaluation_needs_held_out_data(tmp_path: Path) -> None:
    assert only(tmp_path, "train.eval_every=5").key == "train.eval_every"
    checked(tmp_path, "train.eval_every=5", "data.validation_fraction=0.1")


def test_token_rows_hold_nothing_out(tmp_path: Path) -> None:
    overrides = ("data.source=tokens", "data.path=x.npy")
    checked(tmp_path, *overrides)
    found = problems(tmp_path, *overrides, "train.eval_every=5", "data.validation_fraction=0.1")
    assert [problem.key for problem in found] == ["data.validation_fraction", "train.eval_every"]
    checked(tmp_path, *overrides, "train.eval_every=0", "data.validation_fraction=0")


def test_a_corpus_for_evaluation_is_that_of_arrow_and_instead_of_a_fraction(tmp_path: Path) -> None:
    arrow = ("data.source=arrow", "data.path=x", "data.validation_path=y", "data.validation_fraction=0")
    checked(tmp_path, *arrow, "train.eval_every=5")
    assert only(tmp_path, *arrow[:3], "data.validation_fraction=0.1").key == "data.validation_fraction"
    text = ("data.source=text", "data.path=x", "data.validation_path=y", "data.validation_fraction=0")
    assert only(tmp_path, *text, "train.eval_every=5").key == "data.validation_path"


def test_a_mixture_has_corpora_of_a_source_of_rows_and_a_weight_for_each(tmp_path: Path) -> None:
    mixed = ("data.source=arrow", 'data.mixture=["a.arrow", "b.arrow"]')
    checked(tmp_path, *mixed)
    checked(tmp_path, *mixed, "data.weights=[0.123, 0.877]")
    checked(tmp_path, "data.source=tokens", 'data.mixture=["a.npy", "b.npy"]', "train.eval_every=0")
    assert only(tmp_path, 'data.mixture=["a"]', "data.source=text").key == "data.mixture"
    assert only(tmp_path, *mixed, "data.path=c.arrow").key == "data.path"
    assert "twice" in only(tmp_path, "data.source=arrow", 'data.mixture=["a", "a"]').reason
    assert "3 numbers for the 2 corpora" in only(tmp_path, *mixed, "data.weights=[1, 2, 3]").reason
    assert "0 corpora" in only(tmp_path, "data.source=arrow", "data.path=a", "data.weights=[1]").reason
    assert "repeat after 1000003," in only(tmp_path, *mixed, "data.weights=[1, 1000002]").reason
    assert "greater than 0" in only(tmp_path, *mixed, "data.weights=[1, 0]").reason


def test_best_fit_needs_documents(tmp_path: Path) -> None:
    checked(tmp_path, "data.source=arrow", "data.path=x", "data.packing=best_fit")
    found = only(tmp_path, "data.packing=best_fit")
    assert found.key == "data.packing"
    assert "source=stdlib is one stream of tokens" in found.reason


def test_masks_need_the_end_of_a_document(tmp_path: Path) -> None:
    checked(tmp_path, "data.doc_mask=true")
    tokens = ("data.source=tokens", "data.path=x.npy", "train.eval_every=0", "data.doc_mask=true")
    assert "no tokenizer that names it" in only(tmp_path, *tokens).reason
    checked(tmp_path, *tokens, "data.tokenizer=t")
    checked(tmp_path, "data.doc_mask=true", "parallel.pp=2", world=2)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["backend.name=xla"], "nxd runs on the backend neuron, not on xla"),
        (["backend.name=cuda"], "nxd runs on the backend neuron, not on cuda"),
        (["parallel.shard=full"], "nxd has layers of whole parameters, but parallel.shard=full cuts them further"),
    ],
)
def test_layers_of_nxd_are_refused_where_they_cannot_run(tmp_path: Path, overrides: list[str], reason: str) -> None:
    found = only(tmp_path, "backend.layers=nxd", *overrides)
    assert (found.key, found.reason) == ("backend.layers", reason)
    assert "use backend.layers=native" in found.hint
    for name in ("auto", "neuron", "cpu"):
        checked(tmp_path, "backend.layers=nxd", f"backend.name={name}", "parallel.shard=zero1")


def test_model_config_changes_the_preset(tmp_path: Path) -> None:
    resolved = checked(tmp_path, "model.preset=llama3.1-8b", "model.config.num_hidden_layers=2")
    base = resolved.family.preset("llama3.1-8b").model_dump()
    assert resolved.model.model_dump() == {**base, "num_hidden_layers": 2}


def test_model_config_changes_a_part_of_a_nested_table(tmp_path: Path) -> None:
    resolved = checked(tmp_path, "model.preset=llama3.1-8b", "model.config.rope_scaling.factor=4")
    base = resolved.family.preset("llama3.1-8b").model_dump()
    assert resolved.model.model_dump()["rope_scaling"] == {**base["rope_scaling"], "factor": 4.0}


def test_mistakes_in_model_config_have_full_keys_and_nearest_names(tmp_path: Path) -> None:
    overrides = ("model.config.hiden_size=8", "model.config.vocab_size=many", "model.config.num_hidden_layers=0")
    found = {problem.key: problem for problem in problems(tmp_path, *overrides)}
    assert found["model.config.hiden_size"].hint == "did you mean model.config.hidden_size?"
    assert found["model.config.vocab_size"].reason == '"many" is a string, but an integer is needed'
    assert found["model.config.num_hidden_layers"].reason == "0: must be greater than 0"
    assert {problem.origin for problem in found.values()} == {"override"}


def test_a_shape_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    found = only(tmp_path, "model.config.num_key_value_heads=3")
    assert (found.key, found.origin) == ("model.config", "override")
    assert "num_key_value_heads=3 does not divide num_attention_heads=4" in found.reason


def test_an_unknown_preset_or_family_is_refused(tmp_path: Path) -> None:
    assert only(tmp_path, "model.preset=llama9").key == "model.preset"
    assert only(tmp_path, "model.family=mamba").key == "model.family"


def test_the_shape_may_come_from_a_hugging_face_folder(hf: Path) -> None:
    model = checked(hf, f"model.hf={hf}", "model.init=hf", "model.config.num_hidden_layers=1").model.model_dump()
    assert {name: model[name] for name in ("vocab_size", "num_hidden_layers", "tie_word_embeddings")} == {
        "vocab_size": 96,
        "num_hidden_layers": 1,
        "tie_word_embeddings": True,
    }


def test_the_folder_chooses_the_family_unless_the_configuration_does(hf: Path) -> None:
    qwen = {**json.loads((hf / "config.json").read_text()), "model_type": "qwen2"}
    (hf / "config.json").write_text(json.dumps(qwen))
    assert checked(hf, f"model.hf={hf}").family.name == "qwen2"
    found = only(hf, f"model.hf={hf}", "model.family=llama")
    assert (found.key, found.reason) == ("model_type", "'qwen2' is not supported; only 'llama' is")


def test_a_folder_of_a_family_that_is_not_installed_is_refused_with_those_that_are(hf: Path) -> None:
    (hf / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    found = only(hf, f"model.hf={hf}")
    assert (found.key, found.hint) == ("model.hf", "installed: llama, mistral, qwen2, qwen3")
    assert "config.json is of model_type 'mamba', which no installed family computes" in found.reason


def test_two_sources_of_the_shape_are_refused(hf: Path) -> None:
    found = only(hf, f"model.hf={hf}", "model.preset=tiny")
    assert found.key == "model.preset"
    assert "both give the shape" in found.reason


def test_weights_of_hugging_face_need_their_folder(tmp_path: Path) -> None:
    assert only(tmp_path, "model.init=hf").key == "model.init"


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "cannot read"), ("{", "is not valid JSON"), ("[]", "holds no JSON object")],
)
def test_a_broken_hugging_face_folder_is_named(tmp_path: Path, content: str | None, reason: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content, encoding="utf-8")
    found = only(tmp_path, f"model.hf={tmp_path}")
    assert found.key == "model.hf"
    assert reason in found.reason
    assert str(tmp_path / "config.json") in found.reason


def test_resolve_model_works_on_a_plain_config() -> None:
    assert resolve_model(RunConfig()).vocab_size > 0


@pytest.mark.parametrize(
    ("mirror", "reason"),
    [
        ("s3://", "names no bucket"),
        ("s3:/bucket/run", "names no bucket"),
        ("s3:///run", "names no bucket"),
        ("runs/a/copies", "lies in run.dir=runs/a"),
        ("runs/a", "lies in run.dir=runs/a"),
    ],
)
def test_a_mirror_is_a_bucket_or_a_folder_outside_of_the_run(tmp_path: Path, mirror: str, reason: str) -> None:
    problem = only(tmp_path, "run.dir=runs/a", f"checkpoint.mirror={mirror}", world=1)
    assert problem.key == "checkpoint.mirror"
    assert reason in problem.reason


def test_a_mirror_may_lie_beside_the_run(tmp_path: Path) -> None:
    for mirror in ("s3://bucket/run", "s3://bucket", "runs/b"):
        checked(tmp_path, "run.dir=runs/a", f"checkpoint.mirror={mirror}", world=1)


@pytest.mark.parametrize(("backend", "refused"), [("cpu", True), ("cuda", True), ("neuron", False), ("auto", False)])
def test_only_trainium_rounds_by_hardware(tmp_path: Path, backend: str, refused: bool) -> None:
    overrides = ("backend.rounding=hardware", f"backend.name={backend}")
    if not refused:
        checked(tmp_path, *overrides)
        return
    with pytest.raises(ConfigError, match=r"backend\.rounding .*: hardware rounds at random on Trainium alone"):
        checked(tmp_path, *overrides)


def test_torchneuron_has_no_collectives_of_host_memory(tmp_path: Path) -> None:
    overrides = ("parallel.shard=full", "parallel.offload=true", "parallel.dp=4")
    checked(tmp_path, "backend.name=cuda", *overrides)
    with pytest.raises(ConfigError, match=r"parallel\.offload .*: reduces tensors of host memory.*\n.*use false"):
        checked(tmp_path, "backend.name=neuron-native", *overrides)


def test_adapters_need_given_weights_and_our_layers_and_above_nf4_an_eager_device(tmp_path: Path, hf: Path) -> None:
    given = (f"model.hf={hf}", "model.init=hf", "finetune.method=lora")
    assert checked(tmp_path, *given, "parallel.pp=3", world=3).config.finetune.r == 16
    problem = only(tmp_path, "finetune.method=lora")
    assert problem.key == "finetune.method" and problem.hint == "set model.hf=FOLDER and model.init=hf"
    assert "backend.layers=nxd replaces" in only(tmp_path, *given, "backend.layers=nxd").reason
    assert only(tmp_path, *given, 'finetune.targets=["q_proj", "q_proj"]').key == "finetune.targets"
    assert only(tmp_path, "finetune.adapter=runs/chat/adapter").key == "finetune.adapter"
    for override in ("backend.name=xla", "backend.name=neuron-native", "compile.torch_compile=true"):
        assert "restores NF4 eagerly" in only(tmp_path, *given[:2], "finetune.method=qlora", override).reason


def test_masks_of_adapters_are_drawn_on_every_layout_and_backend(tmp_path: Path, hf: Path) -> None:
    given = (f"model.hf={hf}", "model.init=hf", "finetune.method=lora", "finetune.dropout=0.1")
    for override in ("parallel.pp=3", "backend.name=xla", "compile.torch_compile=true"):
        assert checked(tmp_path, *given, override).config.finetune.dropout == 0.1
    assert only(tmp_path, *given[:3], "finetune.dropout=1.0").key == "finetune.dropout"


def test_a_configuration_with_a_byte_order_mark_is_read(tmp_path: Path, hf: Path) -> None:
    plain = checked(hf, f"model.hf={hf}").model
    (hf / "config.json").write_bytes(b"\xef\xbb\xbf" + (hf / "config.json").read_bytes())
    assert checked(hf, f"model.hf={hf}").model == plain
    assert read_object(hf / "config.json")["model_type"]
