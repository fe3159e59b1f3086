"""Layouts of QLoRA: plans and searches refuse the cuts that a run refuses, in the same words."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxtrain.backends.base import Backend
from nxtrain.backends.cpu import CpuBackend
from nxtrain.common.errors import ConfigError, Problem
from nxtrain.common.machines import MACHINES
from nxtrain.common.mesh import Mesh
from nxtrain.config.check import Resolved
from nxtrain.plan.job import Job
from nxtrain.plan.search import impossible
from nxtrain.train.build import build_meta
from tests.support.models import plan
from tests.unit.plan.test_command import answer

ONE_GPU = ("configs/llama3_2_1b_cuda.toml", "--instance", "p5", "--nodes", "1", "train.seq_len=2048")


@pytest.fixture(scope="module")
def backend() -> CpuBackend:
    return CpuBackend()


def of_run(resolved: Resolved, backend: Backend, tp: int) -> tuple[Problem, ...]:
    """Problems with which the first rank of a tensor parallel group refuses to build its model."""
    try:
        build_meta(resolved, backend, Mesh.build(tp, 0, tp=tp))
    except ConfigError as error:
        return error.problems
    return ()


def of_plan(resolved: Resolved) -> tuple[Problem, ...]:
    job = Job(resolved.dimensions, MACHINES["p5.48xlarge"], 1, resolved.config)
    return tuple(impossible(job))


SIZES: dict[str, Any] = {
    "tp": st.sampled_from([1, 2, 4, 8]),
    "kv_heads": st.sampled_from([1, 2, 4, 8]),
    "width": st.sampled_from([2, 6, 8, 16, 24, 32]),
    "hidden": st.sampled_from([8, 24, 64, 96, 128]),
    "inner": st.sampled_from([40, 64, 89, 96, 128, 256, 512]),
    "qkv": st.booleans(),
    "gate_up": st.booleans(),
}


@settings(max_examples=80)
@given(**SIZES)
def test_a_plan_refuses_what_a_run_refuses(backend: CpuBackend, tp: int, **drawn: Any) -> None:
    shape = {
        "hidden_size": drawn["hidden"],
        "head_dim": drawn["width"],
        "num_key_value_heads": drawn["kv_heads"],
        "intermediate_size": drawn["inner"],
    }
    resolved = plan(
        "mha",
        model={"config": shape, "fused_qkv": drawn["qkv"], "fused_gate_up": drawn["gate_up"]},
        parallel={"tp": tp, "dp": 1},
        finetune={"method": "qlora"},
        backend={"name": "cpu"},
    )
    assert of_plan(resolved) == of_run(resolved, backend, tp)


def test_a_search_and_a_plan_give_the_arithmetic() -> None:
    """A row of 8,448 inner columns over 8 ranks is 1,056 weights long: 16 blocks and a half."""
    changes = ("--method", "qlora", "model.config.intermediate_size=8448", "compile.torch_compile=false")
    result = answer(*ONE_GPU, *changes, "--search")
    reasons = {layout["parallel"]["tp"]: layout["reason"] for layout in result["rejected"]}
    arithmetic = "inside a block of 64 weights, which share a scale: a rank has 8448 / 8 = 1056 weights of each row"
    assert reasons == {8: f"tp=8 cuts down_proj of (2048, 8448) {arithmetic}"}
    with pytest.raises(ConfigError, match=r"8448 / 8 = 1056 weights of each row\n    use a smaller parallel.tp"):
        answer(*ONE_GPU, *changes, "parallel.tp=8", "parallel.dp=1", "parallel.shard=none")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            ("compile.torch_compile=true", "finetune.method=qlora"),
            "dequantizes NF4 in eager mode on cuda and cpu, not with compile",
        ),
        (("backend.layers=nxd", "--method", "lora"), "which backend.layers=nxd replaces"),
        (("precision.accumulate=fp32", "precision.reduce=bf16"), "both have one type"),
        (("precision.params=fp16", "--instance", "trn1.32xl"), "fp16 runs on the backends cpu and cuda, not on neuron"),
    ],
)
def test_a_search_knows_the_rules_of_a_run(change: tuple[str, ...], reason: str) -> None:
    result = answer(*ONE_GPU, "--search", *change)
    assert any(reason in layout["reason"] for layout in result["rejected"])
