"""Plans of fine-tuning: trained parameters, operations, memory that fits, and searches over methods."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxtrain.common.errors import ConfigError
from nxtrain.plan.adapters import METHODS, NF4_BYTES
from nxtrain.plan.job import Job
from nxtrain.plan.memory import rank_bytes
from nxtrain.plan.predict import Assumptions, Prediction
from nxtrain.plan.speed import MEMORY_SHARE, step_time
from nxtrain.plan.work import adapter_params, model_flops_per_token, passes
from tests.support.published import job_of
from tests.unit.plan.test_command import answer

ROW: dict[str, Any] = {
    "model": "llama3-8b",
    "instance": "g5.2xlarge",
    "nodes": 1,
    "tp": 1,
    "pp": 1,
    "shard": "none",
    "seq_len": 2048,
    "global_batch": 8,
    "remat": "full",
}


def job(method: str = "lora", r: int = 16, targets: tuple[str, ...] = (), dropout: float = 0.0, **row: Any) -> Job:
    return job_of({**ROW, **row, "finetune": {"method": method, "r": r, "targets": targets, "dropout": dropout}})


@pytest.mark.parametrize(
    ("model", "r", "targets", "trained"),
    [
        ("llama3-8b", 16, (), 41_943_040),
        ("llama2-7b", 8, ("q_proj", "v_proj"), 4_194_304),
        ("llama2-7b", 64, (), 159_907_840),
    ],
)
def test_trained_parameters_are_those_that_peft_prints(
    model: str, r: int, targets: tuple[str, ...], trained: int
) -> None:
    result = Prediction.of(job(r=r, targets=targets, model=model), Assumptions())
    assert result.trained_params == trained
    assert result.to_json()["trained_share"] == trained / result.job.dimensions.num_params
    # Parameters in bf16, master copies, and two means.
    assert result.checkpoint_bytes == 14 * trained


@settings(max_examples=60)
@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    r=st.integers(1, 64),
    targets=st.sets(st.sampled_from(["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])),
    shard=st.sampled_from(["none", "zero1", "full"]),
    method=st.sampled_from(["lora", "qlora"]),
)
def test_state_belongs_to_adapters_alone(tp: int, r: int, targets: set[str], shard: str, method: str) -> None:
    """Against sums over the matrices by hand: 8B with 8 key and value heads, on 8 devices."""
    one = job(method, r, tuple(targets), tp=tp, instance="p4de.24xlarge", shard=shard)
    chosen = targets or {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    shapes = []
    for outs in ({"q_proj": 4096, "k_proj": 1024, "v_proj": 1024}, {"gate_proj": 14336, "up_proj": 14336}):
        if widths := [width // tp for name, width in outs.items() if name in chosen]:
            shapes += [(r * len(widths), 4096), (sum(widths), r)]
    for name, width in (("o_proj", 4096), ("down_proj", 14336)):
        shapes += [(r, width // tp), (4096, r)] if name in chosen else []
    share = 8 // tp

    def entries(ranks: int) -> int:
        return 32 * sum(-(-rows // ranks) * columns for rows, columns in shapes)

    result = rank_bytes(one)[1]
    sharded = shard == "full" and share > 1
    assert result.params == (4 * entries(share) if sharded else 2 * entries(1))
    # Two means and a master copy, which are the shards themselves under full sharding; ZeRO-1's own rows in bf16.
    state = 8 if sharded else 14 if shard == "zero1" else 12
    assert result.optimizer == state * entries(1 if shard == "none" else share)
    matrices, others = 32 * one.dimensions.block_matmul_params, (2 * 128256 + 1) * 4096 + 64 * 4096
    narrow = NF4_BYTES if method == "qlora" else 2
    replicated_norms = 65 * 4096 * 2 * (1 - 1 / tp)
    frozen = (matrices * narrow + others * 2) / tp + replicated_norms
    assert result.frozen == pytest.approx(frozen / (share if sharded else 1), rel=1e-4)


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_a_frozen_matrix_takes_four_operations_and_an_adapter_six(method: str) -> None:
    one, whole = job(method, remat="none"), job("full", remat="none")
    forward, backward = (sum(pass_[:2]) for pass_ in passes(one, range(32), has_head=True))
    assert (forward + backward) / one.micro_tokens == model_flops_per_token(one)
    adapters, attention = 32 * adapter_params(one), 32 * 2 * 4096 * 2048
    frozen = 32 * one.dimensions.block_matmul_params + 128256 * 4096
    assert model_flops_per_token(one) == 4 * frozen + 6 * adapters + 3 * attention
    assert model_flops_per_token(whole) == 6 * frozen + 3 * attention
    assert forward == pytest.approx(one.micro_tokens * (2 * frozen + 2 * adapters + attention))
    assert one.tokens_per_step / step_time(one).step_s > one.tokens_per_step / step_time(whole).step_s


def test_quantized_matrices_are_restored_in_both_passes() -> None:
    lora, qlora = (step_time(job(method)).step_s for method in ("lora", "qlora"))
    one = job("qlora")
    moved = 32 * one.dimensions.block_matmul_params * (NF4_BYTES + 2)
    restored = 3  # forward, again for backward, and backward
    expected = one.num_micro * restored * moved / (one.machine.memory_bytes_s * MEMORY_SHARE)
    assert qlora - lora == pytest.approx(expected, rel=1e-6)


def test_frozen_layers_gather_no_inputs_again() -> None:
    lora, full = (
        step_time(job(method, tp=8, instance="p5.48xlarge", remat="none")).traffic[0] for method in ("lora", "full")
    )
    assert lora.bytes / full.bytes == pytest.approx(8 / 10)
    assert lora.hidden == pytest.approx(0, abs=1e-9)
    assert full.hidden == pytest.approx(0.36)


def test_memory_of_activations_depends_on_what_adapters_read() -> None:
    """Inputs of layers without adapters are free; dropout keeps what it left of them, with a byte per entry."""
    jobs = {
        "all": job(remat="none", loss_chunk_mib=64),  # the loss takes less than the blocks
        "some": job(remat="none", loss_chunk_mib=64, targets=("q_proj", "v_proj")),
        "dropout": job(remat="none", loss_chunk_mib=64, dropout=0.1),
    }
    sizes = {name: rank_bytes(one)[1].activations for name, one in jobs.items()}
    tokens, layers = 2048 * job().config.train.micro_batch, 32
    # The inputs of gate and up, and of down; attention keeps its output anyway. Adapters keep r columns each.
    unread = tokens * layers * 2 * (4096 + 14336 + 16 * 5)
    # The backward pass of a layer frees the input of down first, if anything kept it.
    assert sizes["all"] - sizes["some"] == unread - tokens * 2 * 14336
    dropped = tokens * layers * ((2 + 1) * (4096 + 4096 + 4096 + 14336) - 2 * (4096 + 4096 + 14336))
    assert sizes["dropout"] - sizes["all"] == dropped + tokens * 2 * 14336


FIT: dict[str, dict[str, Any]] = {
    "8B QLoRA on one A10G": {"method": "qlora"},
    "8B LoRA on one A10G": {"method": "lora"},
    "7B LoRA on one A10G": {"model": "llama2-7b"},
    "7B QLoRA on one A10G": {"method": "qlora", "model": "llama2-7b", "remat": "none", "seq_len": 512},
    "70B QLoRA on one L40S": {"method": "qlora", "model": "llama2-70b", "instance": "g6e.2xlarge", "seq_len": 512},
    "70B QLoRA on p4d, tp=2": {"method": "qlora", "model": "llama3-70b", "instance": "p4d.24xlarge", "tp": 2},
    "70B QLoRA on p4d, fully sharded": {
        "method": "qlora",
        "model": "llama3-70b",
        "instance": "p4d.24xlarge",
        "shard": "full",
    },
    "70B QLoRA on one H100": {"method": "qlora", "model": "llama3-70b", "instance": "p5.48xlarge", "dp": 1},
    "70B LoRA on p4d, tp=8": {"model": "llama3-70b", "instance": "p4d.24xlarge", "tp": 8},
    "405B QLoRA on p5, fully sharded": {
        "method": "qlora",
        "model": "llama3.1-405b",
        "instance": "p5.48xlarge",
        "shard": "full",
    },
    "8B LoRA on trn1, tp=8": {"instance": "trn1.32xlarge", "tp": 8},
    "8B in full on p4de, fully sharded": {"method": "full", "instance": "p4de.24xlarge", "shard": "full"},
}

NOT_FIT: dict[str, dict[str, Any]] = {
    "8B in full on one A10G": {"method": "full"},
    "8B in full on one H100": {"method": "full", "instance": "p5.48xlarge", "dp": 1},
    "8B LoRA on one A10G, 16384 tokens kept": {"seq_len": 16_384, "remat": "none"},
    "13B LoRA on one A10G": {"model": "llama2-13b"},
    "70B QLoRA on one A10G": {"method": "qlora", "model": "llama3-70b"},
    "70B LoRA on one H100": {"model": "llama3-70b", "instance": "p5.48xlarge", "dp": 1},
    "70B LoRA on p4d by data parallelism alone": {"model": "llama3-70b", "instance": "p4d.24xlarge"},
    "70B in full on p4de, fully sharded": {
        "method": "full",
        "model": "llama3-70b",
        "instance": "p4de.24xlarge",
        "shard": "full",
    },
    "405B QLoRA on p4d, fully sharded": {
        "method": "qlora",
        "model": "llama3.1-405b",
        "instance": "p4d.24xlarge",
        "shard": "full",
    },
}


@pytest.mark.parametrize("case", FIT)
def test_what_is_known_to_fit_fits(case: str) -> None:
    one = job(**FIT[case])
    assert rank_bytes(one)[1].total <= one.machine.device_bytes


@pytest.mark.parametrize("case", NOT_FIT)
def test_what_is_known_not_to_fit_does_not(case: str) -> None:
    one = job(**NOT_FIT[case])
    assert rank_bytes(one)[1].total > one.machine.device_bytes


ONE_GPU = ("configs/llama3_2_1b_cuda.toml", "--model", "llama3-8b", "train.seq_len=2048", "train.global_batch=8")


def test_a_search_over_all_methods_says_which_fit() -> None:
    result = answer(*ONE_GPU, "--instance", "g5.2xlarge", "--nodes", "1", "--search", "--method", "all")
    assert {layout["method"] for layout in result["layouts"]} == {"lora", "qlora"}
    assert [layout["method"] for layout in result["rejected"]] == ["full"]
    assert "needs" in result["rejected"][0]["reason"]
    on_trainium = answer(*ONE_GPU, "--instance", "trn1.32xl", "--nodes", "1", "--search", "--method", "all")
    assert {layout["method"] for layout in on_trainium["layouts"]} == {"full", "lora"}
    quantized = [layout["reason"] for layout in on_trainium["rejected"] if layout["method"] == "qlora"]
    assert quantized
    assert all("NF4 in eager mode on cuda and cpu, not with backend.name=neuron" in reason for reason in quantized)


def test_one_method_is_planned_by_its_flag_or_by_the_configuration() -> None:
    alone = ("--instance", "g5.2xlarge", "parallel.dp=1", "parallel.shard=none")
    by_flag = answer(*ONE_GPU, *alone, "--method", "lora")
    by_key = answer(*ONE_GPU, *alone, "finetune.method=lora")
    assert by_flag == by_key
    assert (by_flag["method"], by_flag["trained_params"]) == ("lora", 41_943_040)
    assert by_flag["run"]["flops_4nd"] == pytest.approx(by_flag["run"]["flops_6nd"] * 4 / 6)
    for argv, words in ((("--method", "qlorra"), "did you mean qlora"), (("--method", "all"), "add --search")):
        with pytest.raises(ConfigError, match=words):
            answer(*ONE_GPU, *alone, *argv)
    assert METHODS == ("full", "lora", "qlora")
