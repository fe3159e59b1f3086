"""Values that cannot run together are refused, all at once, with the arithmetic and the values that would work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nxtrain.checkpoint.convert.hf_folder import read_object
from nxtrain.common.errors import ConfigError, Problem
from nxtrain.config.check import Resolved, resolve_config
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


ARROW = "data.source=arrow"
MIXED = f'{ARROW} data.mixture=["a.arrow","b.arrow"]'
IN_JOB = "recovery.in_job=true recovery.max_restarts=3"
HARDWARE = "backend.rounding=hardware precision.type=bf16SR"
TOKENS = "data.source=tokens data.path=x.npy train.eval_every=0"


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


REFUSED = [
    ("model.moe_dispatch=capacity", "model.moe_dispatch", "capacity is for models with experts, and this one has none"),
    ("model.moe_z_loss=0.1", "model.moe_z_loss", "0.1 is for models with experts, and this one has none"),
    ("parallel.tp=3", "parallel.tp", "tp=3 does not divide model.config.num_attention_heads=4"),
    (
        "model.config.num_key_value_heads=3",
        "model.config",
        "num_key_value_heads=3 does not divide num_attention_heads=4",
    ),
    ("model.preset=llama9", "model.preset", ""),
    ("model.family=mamba", "model.family", ""),
    ("model.init=hf", "model.init", ""),
    ("precision.accumulate=bf16", "precision.accumulate", "use precision.accumulate=fp32"),
    (
        "parallel.shard=full parallel.shard_size=2",
        "parallel.shard_size",
        "shard_size=0, or parallel.shard=hybrid",
    ),
    ("parallel.shard=hybrid parallel.shard_size=3 parallel.dp=4", "parallel.shard_size", "3 does not divide dp=4"),
    ("parallel.shard=hybrid parallel.shard_size=3 parallel.dp=4", "parallel.shard_size", "use one of 1, 2, 4"),
    ("parallel.shard=zero1 parallel.offload=true", "parallel.offload", ""),
    ("parallel.shard=full parallel.offload=true parallel.dp=1", "parallel.offload", ""),
    ("parallel.shard=zero1 parallel.prefetch=2", "parallel.prefetch", ""),
    (
        "parallel.shard=full backend.name=xla",
        "parallel.shard",
        "cpu, cuda and neuron-native, not on xla",
    ),
    (
        "parallel.shard=full parallel.offload=true parallel.dp=4 backend.name=neuron-native",
        "parallel.offload",
        "reduces tensors in host memory",
    ),
    ("compile.torch_compile=true backend.name=xla", "compile.torch_compile", "backend.name=xla records whole steps"),
    ("compile.torch_compile=true backend.name=neuron", "compile.torch_compile", "neuron records whole steps"),
    ("compile.torch_compile=step parallel.pp=2", "compile.torch_compile", "pp=2 cuts it into stages"),
    ("compile.torch_compile=step parallel.shard=full parallel.prefetch=2", "parallel.prefetch", "compiler schedules"),
    *((f"{HARDWARE} backend.name={name}", "backend.rounding", "exists on Trainium only") for name in ("cpu", "cuda")),
    ("backend.layers=nxd backend.name=xla", "backend.layers", "nxd runs on the backend neuron, not on xla"),
    ("backend.layers=nxd backend.name=cuda", "backend.layers", "nxd runs on the backend neuron, not on cuda"),
    ("backend.layers=nxd parallel.shard=full", "backend.layers", "parallel.shard=full shards them"),
    ("backend.layers=nxd parallel.shard=full", "backend.layers", "use backend.layers=native"),
    ("data.path=x", "data.source", ""),
    ("train.eval_every=5", "train.eval_every", ""),
    (f"{ARROW} data.path=x data.validation_path=y data.validation_fraction=0.1", "data.validation_fraction", ""),
    ("data.source=text data.path=x data.validation_path=y train.eval_every=5", "data.validation_path", ""),
    ('data.mixture=["a"] data.source=text', "data.mixture", ""),
    (f"{MIXED} data.path=c.arrow", "data.path", ""),
    (f'{ARROW} data.mixture=["a","a"]', "data.mixture", "twice"),
    (f"{MIXED} data.weights=[1,2,3]", "data.weights", "3 numbers for the 2 corpora"),
    (f"{ARROW} data.path=a data.weights=[1]", "data.weights", "0 corpora"),
    (f"{MIXED} data.weights=[1,1000002]", "data.weights", "repeat after 1000003 rows,"),
    (f"{MIXED} data.weights=[1,0]", "data.weights", "greater than 0"),
    ("data.packing=best_fit", "data.packing", "source=stdlib is one stream of tokens"),
    (f"{TOKENS} data.doc_mask=true", "data.doc_mask", "no tokenizer that defines this token"),
    ("run.dir=runs/a checkpoint.mirror=s3://", "checkpoint.mirror", "names no bucket"),
    ("run.dir=runs/a checkpoint.mirror=s3:/bucket/run", "checkpoint.mirror", "did you mean s3://bucket/run"),
    ("run.dir=runs/a checkpoint.mirror=az:///run", "checkpoint.mirror", "names no bucket"),
    ("run.dir=runs/a checkpoint.mirror=runs/a/copies", "checkpoint.mirror", "lies in run.dir=runs/a"),
    ("run.dir=runs/a checkpoint.mirror=runs/a", "checkpoint.mirror", "lies in run.dir=runs/a"),
    ("recovery.in_job=true", "recovery.in_job", "recovery.max_restarts=0 allows none"),
    (f"{IN_JOB} backend.name=neuron", "recovery.in_job", "ranks of CPUs and GPUs, not of backend.name=neuron"),
    (f"{IN_JOB} backend.name=cpu cluster.nodes=2", "recovery.in_job", "one machine, and cluster.nodes=2"),
    (f"{IN_JOB} run.dir=runs/a checkpoint.mirror=runs/b", "recovery.in_job", "upload to checkpoint.mirror"),
]
"""Overrides, the key of the one problem, and words of its reason or of its way out."""

ACCEPTED = [
    "precision.params=bf16 precision.update=bf16_kahan precision.accumulate=bf16",
    "precision.reduce=bf16",
    "parallel.shard=hybrid parallel.shard_size=2 parallel.dp=4 parallel.offload=true",
    "parallel.shard=full parallel.offload=true parallel.dp=4 backend.name=cuda",
    "parallel.shard=zero1 backend.name=xla",
    "parallel.shard=full backend.name=neuron-native",
    "compile.torch_compile=true backend.name=neuron-native",
    *(f"{HARDWARE} backend.name={name}" for name in ("neuron", "auto")),
    *(f"backend.layers=nxd parallel.shard=zero1 backend.name={name}" for name in ("auto", "neuron", "cpu")),
    "data.path=x data.source=stdlib",
    "train.eval_every=5 data.validation_fraction=0.1",
    f"{ARROW} data.path=x data.validation_path=y data.validation_fraction=0 train.eval_every=5",
    MIXED,
    f"{MIXED} data.weights=[0.123,0.877]",
    'data.source=tokens data.mixture=["a.npy","b.npy"] train.eval_every=0',
    f"{ARROW} data.path=x data.packing=best_fit",
    "data.doc_mask=true",
    "data.doc_mask=true parallel.pp=2",
    f"{TOKENS} data.doc_mask=true data.tokenizer=t",
    *(f"{IN_JOB} backend.name={name}" for name in ("auto", "cpu")),
    *(f"run.dir=runs/a checkpoint.mirror={mirror}" for mirror in ("s3://bucket/run", "s3://bucket", "runs/b")),
]


@pytest.mark.parametrize(("overrides", "key", "words"), REFUSED)
def test_values_that_cannot_run_together_are_refused(tmp_path: Path, overrides: str, key: str, words: str) -> None:
    result = only(tmp_path, *overrides.split())
    assert result.key == key
    assert words in result.reason or words in result.hint


@pytest.mark.parametrize("overrides", ACCEPTED)
def test_values_that_can_run_together_are_accepted(tmp_path: Path, overrides: str) -> None:
    checked(tmp_path, *overrides.split())


def test_the_defaults_run(tmp_path: Path) -> None:
    resolved = checked(tmp_path, world=1)
    assert resolved.config == RunConfig()
    assert resolved.model == resolved.family.preset("tiny")


def test_global_batch_is_whole_micro_batches(tmp_path: Path) -> None:
    result = only(tmp_path, "train.global_batch=12", "train.micro_batch=4", "parallel.dp=2")
    assert result == Problem(
        "train.global_batch",
        "12 is not a multiple of micro_batch=4 x dp=2 = 8",
        "override",
        "use train.global_batch=8 or 16, or train.micro_batch among 1, 2, 3, 6",
    )


@pytest.mark.parametrize("steps", ["[5]", "[5,4]", "[1,101]", "[1,2,3]"])
def test_a_profile_has_a_first_and_a_last_step(tmp_path: Path, steps: str) -> None:
    result = only(tmp_path, f"metrics.profile_steps={steps}")
    assert result.key == "metrics.profile_steps"
    assert "is not the first and the last of at most 100 steps" in result.reason
    checked(tmp_path, f"metrics.profile_steps={result.hint.removeprefix('use such as ')}")


@pytest.mark.parametrize("fix", ["train.global_batch=8", "train.global_batch=16", "train.micro_batch=6"])
def test_the_batches_that_the_hint_names_work(tmp_path: Path, fix: str) -> None:
    checked(tmp_path, "train.global_batch=12", "train.micro_batch=4", "parallel.dp=2", fix)


def test_dp_follows_from_the_world(tmp_path: Path) -> None:
    overrides = ("parallel.tp=2", "train.global_batch=6", "train.micro_batch=3")
    checked(tmp_path, *overrides, world=4)
    result = only(tmp_path, *overrides, world=8)
    assert result.reason == "6 is not a multiple of micro_batch=3 x dp=4 = 12"
    assert result.hint == "use train.global_batch=12"


def test_sequence_parallelism_cuts_whole_tokens(tmp_path: Path) -> None:
    overrides = ("parallel.tp=4", "train.seq_len=130")
    checked(tmp_path, *overrides)
    result = only(tmp_path, *overrides, "parallel.sequence_parallel=true")
    assert result.key == "train.seq_len"
    assert result.reason == "tp=4 does not divide seq_len=130, as sequence_parallel asks"
    assert result.hint == "use train.seq_len=128 or 132, or parallel.sequence_parallel=false"


def test_the_degrees_multiply_to_the_world(tmp_path: Path) -> None:
    assert only(tmp_path, "parallel.tp=2", world=3).key == "parallel.tp"
    result = only(tmp_path, "parallel.pp=2", world=3)
    assert (result.key, result.origin) == ("parallel.pp", "override")
    assert only(tmp_path, "parallel.dp=2", world=4).reason == "tp=1 x pp=1 x dp=2 = 2 ranks, but the world has 4"


def test_all_rules_are_checked_at_once(tmp_path: Path) -> None:
    result = problems(
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
    assert [(problem.key, problem.origin) for problem in result] == [
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
    result = only(tmp_path, *overrides, "optim.betas=[0.9, 0.999]")
    assert result.key == "precision.state"
    assert "optim.betas[1]=0.999" in result.reason
    assert result.hint == "use precision.state=fp32, update=bf16_stochastic, or optim.betas[1]=0.99 or less"
    checked(tmp_path, *overrides, "optim.betas=[0.9, 0.99]")
    rounded_at_random = ("precision.params=bf16", "precision.update=bf16_stochastic", "precision.state=bf16")
    checked(tmp_path, *rounded_at_random, "optim.betas=[0.9, 0.999]")


@pytest.mark.parametrize("shard", ["grad_op", "full", "hybrid"])
def test_sharded_gradients_are_summed_in_the_type_they_are_reduced_in(tmp_path: Path, shard: str) -> None:
    result = only(tmp_path, *BF16, f"parallel.shard={shard}", "precision.reduce=bf16")
    assert (result.key, result.hint) == ("precision.accumulate", "use precision.accumulate=bf16")
    checked(tmp_path, *BF16, f"parallel.shard={shard}", "precision.reduce=bf16", "precision.accumulate=bf16")
    checked(tmp_path, *BF16, "parallel.shard=zero1", "precision.reduce=bf16")
    if shard == "hybrid":  # across nodes sums are kept in the type of the reduction
        assert only(tmp_path, "parallel.shard=hybrid", "precision.reduce=bf16").hint == "use precision.reduce=fp32"
    else:
        checked(tmp_path, f"parallel.shard={shard}", "precision.reduce=bf16")  # fp32 gradients are summed in fp32


def test_token_rows_hold_nothing_out(tmp_path: Path) -> None:
    overrides = ("data.source=tokens", "data.path=x.npy")
    checked(tmp_path, *overrides)
    result = problems(tmp_path, *overrides, "train.eval_every=5", "data.validation_fraction=0.1")
    assert [problem.key for problem in result] == ["data.validation_fraction", "train.eval_every"]
    checked(tmp_path, *overrides, "train.eval_every=0", "data.validation_fraction=0")


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
    result = {problem.key: problem for problem in problems(tmp_path, *overrides)}
    assert result["model.config.hiden_size"].hint == "did you mean model.config.hidden_size?"
    assert result["model.config.vocab_size"].reason == '"many" is a string, but an integer is needed'
    assert result["model.config.num_hidden_layers"].reason == "0: must be greater than 0"
    assert {problem.origin for problem in result.values()} == {"override"}


def test_experts_without_a_capacity_are_not_compiled(tmp_path: Path) -> None:
    result = only(tmp_path, "model.family=mixtral", "model.preset=tiny", "compile.torch_compile=true")
    assert (result.key, result.hint) == ("compile.torch_compile", "use false, or model.moe_dispatch=capacity")
    assert "the host reads the number of rows of each expert" in result.reason


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
    result = only(hf, f"model.hf={hf}", "model.family=llama")
    assert (result.key, result.reason) == ("model_type", "'qwen2' is not supported; only 'llama' is")


def test_a_folder_of_a_family_that_is_not_installed_is_refused_with_those_that_are(hf: Path) -> None:
    (hf / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    result = only(hf, f"model.hf={hf}")
    assert result.key == "model.hf" and result.hint.endswith("llama, mistral, mixtral, qwen2, qwen3, qwen3_moe")
    assert "config.json is of model_type 'mamba', which no installed family computes" in result.reason


def test_two_sources_of_the_shape_are_refused(hf: Path) -> None:
    result = only(hf, f"model.hf={hf}", "model.preset=tiny")
    assert result.key == "model.preset"
    assert "both give the shape" in result.reason


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "cannot read"), ("{", "is not valid JSON"), ("[]", "holds no JSON object")],
)
def test_a_broken_hugging_face_folder_is_named(tmp_path: Path, content: str | None, reason: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content, encoding="utf-8")
    result = only(tmp_path, f"model.hf={tmp_path}")
    assert result.key == "model.hf"
    assert reason in result.reason
    assert str(tmp_path / "config.json") in result.reason


def test_adapters_need_given_weights_and_our_layers_and_above_nf4_an_eager_device(tmp_path: Path, hf: Path) -> None:
    given = (f"model.hf={hf}", "model.init=hf", "finetune.method=lora")
    assert checked(tmp_path, *given, "parallel.pp=3", world=3).config.finetune.r == 16
    problem = only(tmp_path, "finetune.method=lora")
    assert problem.key == "finetune.method" and problem.hint == "set model.hf=FOLDER and model.init=hf"
    assert "backend.layers=nxd replaces" in only(tmp_path, *given, "backend.layers=nxd").reason
    assert only(tmp_path, *given, 'finetune.targets=["q_proj", "q_proj"]').key == "finetune.targets"
    assert only(tmp_path, "finetune.adapter=runs/chat/adapter").key == "finetune.adapter"
    for override in ("backend.name=xla", "backend.name=neuron-native", "compile.torch_compile=true"):
        assert "dequantizes NF4 in eager mode" in only(tmp_path, *given[:2], "finetune.method=qlora", override).reason


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


@pytest.mark.parametrize(
    ("stage", "reason"),
    [
        ("{global_batch = 4}", "stage 1 has samples=0 and tokens=0, and needs one of them"),
        ("{global_batch = 4, samples = 8, tokens = 8}", "needs one of them"),
        ("{global_batch = 6, samples = 8}", "stage 1: global_batch=6 is not a multiple of micro_batch x dp = 4"),
    ],
)
def test_stages_of_a_batch_ramp_that_cannot_be(tmp_path: Path, stage: str, reason: str) -> None:
    (tmp_path / "run.toml").write_text("[train]\nglobal_batch = 8\nmicro_batch = 2\n[parallel]\ndp = 2")
    resolve_config(load(tmp_path / "run.toml", ["train.batch_ramp=[{global_batch = 4, samples = 9}]"]), 2)
    with pytest.raises(ConfigError) as refused:
        resolve_config(load(tmp_path / "run.toml", [f"train.batch_ramp=[{stage}]"]), 2)
    (result,) = refused.value.problems
    assert result.key == "train.batch_ramp" and reason in result.reason


def test_pairs_need_whole_answers_of_one_corpus_and_dpo_the_first_weights(tmp_path: Path, hf: Path) -> None:
    weights = (f"model.hf={hf}", "model.init=hf")
    rows = ("data.source=arrow", "data.path=pairs.arrow", "data.packing=best_fit", "data.doc_mask=true")
    dpo = (*weights, *rows, "finetune.objective=dpo")
    assert checked(tmp_path, *dpo, "train.epochs=2").config.finetune.stores_reference
    assert not checked(tmp_path, *dpo, "finetune.method=lora").config.finetune.stores_reference
    assert checked(tmp_path, *dpo, "finetune.method=lora", "finetune.adapter=a").config.finetune.stores_reference
    assert not checked(tmp_path, *rows, "finetune.objective=orpo").config.finetune.stores_reference
    assert "compares with the weights from which" in only(tmp_path, *rows, "finetune.objective=dpo").reason
    assert "do not attend to each other" in only(tmp_path, *dpo, "data.doc_mask=false").reason
    assert "do not attend to each other" in only(tmp_path, *dpo, "data.packing=concat").reason
    several = (*weights, rows[0], *rows[2:], "finetune.objective=dpo", 'data.mixture=["a", "b"]')
    assert "data.mixture has several" in only(tmp_path, *several).reason
    for override, reason in (
        ("precision.params=fp16", "the loss scale of params=fp16 does not support"),
        ("backend.layers=nxd", "needs the loss of each token"),
    ):
        assert any(reason in problem.reason for problem in problems(tmp_path, *dpo, override))


@pytest.mark.parametrize(
    ("overrides", "is_refused"),
    [
        (["parallel.dp=2"], False),
        (["parallel.dp=2", "parallel.shard=zero1"], False),
        (["parallel.dp=1"], True),
        (["parallel.dp=2", "parallel.shard=full"], True),
        (["parallel.dp=1", "parallel.cp=2"], True),
    ],
)
def test_the_noise_scale_needs_gradients_of_several_batches(
    tmp_path: Path, overrides: list[str], is_refused: bool
) -> None:
    (tmp_path / "run.toml").write_text("[metrics]\nnoise_scale = true")
    results: list[str] = []
    try:
        resolve_config(load(tmp_path / "run.toml", overrides), 2 if "=2" in "".join(overrides) else 1)
    except ConfigError as error:
        results = [problem.key for problem in error.problems]
    assert results == (["metrics.noise_scale"] if is_refused else [])
