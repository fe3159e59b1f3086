"""Blocks and whole passes under `torch.compile` train as they do without it; equal blocks share one graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition  # type: ignore[import-untyped]
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend

from nxtrain.backends.base import Backend, Binding
from nxtrain.backends.torch_kernels import PlainKernels
from nxtrain.backends.xla.backend import XlaBackend
from nxtrain.common.errors import ConfigError
from nxtrain.common.mesh import Mesh
from nxtrain.config.check import Resolved
from nxtrain.train.build import build_meta
from tests.support.drawn import one_in
from tests.support.lora import adapters_of
from tests.support.models import changed, weights_of
from tests.support.parity import Course, check_course, layout, reference, run_ours
from tests.support.ranks import RankPool
from tests.support.runs import records, run_plan, token_file, train_rank

STEPS = 2
"""The second starts from what the first has updated."""
LAYERS = {"num_hidden_layers": 3}


def run(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor]) -> tuple[Course, int]:
    """Train with compiled blocks; return the course and the number of graphs."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    with patch.object(backend, "compiler", counter):
        return run_ours(backend, resolved, STEPS, weights), counter.frame_count


@pytest.mark.parametrize(
    "how",
    [
        *one_in(
            4,
            [
                {"tp": 1, "remat": "selective"},
                {"tp": 1, "dp": 2, "micro": 1},
                {"tp": 1, "dp": 2, "micro": 1, "shard": "zero1", "remat": "full"},
                {"tp": 1, "dp": 2, "micro": 1, "shard": "full", "remat": "selective"},
                {"tp": 2, "dp": 2, "micro": 2, "sp": True, "shard": "hybrid", "shard_size": 2},
                {"tp": 2, "family": "qwen2"},
                {"tp": 2, "sp": True, "family": "qwen3", "remat": "full"},
                {"tp": 2, "cp": 2, "sp": True, "cp_method": "gather", "seq_len": 40, "remat": "full"},
            ],
        ),
        {"tp": 1, "cp": 2, "cp_method": "gather", "cp_layout": "striped", "seq_len": 46, "remat": "selective"},
    ],
    ids=str,
)
def test_compiled_blocks_train_as_transformers_does_by_one_graph(ranks: RankPool, how: dict[str, Any]) -> None:
    resolved = layout("gqa2", **how, config=LAYERS)
    compiled = changed(resolved, compile={"torch_compile": True})
    result = ranks.run(how["tp"] * how.get("dp", 1) * how.get("cp", 1), run, compiled, weights_of(resolved))
    check_course([course for course, _ in result], reference(resolved, STEPS), resolved)
    assert {graphs for _, graphs in result} == {1}


@pytest.mark.parametrize(
    "how",
    [
        *one_in(
            3,
            [
                {"tp": 2, "sp": True, "micro": 2, "remat": "none"},
                {"tp": 2, "dp": 2, "micro": 2, "sp": True, "shard": "full", "remat": "full"},
                {"tp": 1, "dp": 2, "micro": 1, "shard": "grad_op", "remat": "selective", "family": "qwen2"},
                {"tp": 1, "dp": 2, "micro": 2, "shard": "full", "remat": "full"},
                {"tp": 1, "cp": 2, "dp": 2, "cp_method": "gather", "micro": 1, "seq_len": 40, "shard": "full"},
                {"tp": 1, "dp": 4, "micro": 1, "shard": "hybrid", "shard_size": 2, "remat": "full", "family": "qwen3"},
            ],
        ),
    ],
    ids=str,
)
def test_a_whole_compiled_pass_trains_as_transformers_does_by_one_graph(ranks: RankPool, how: dict[str, Any]) -> None:
    resolved = layout("gqa2", **how, config={"num_hidden_layers": 2})
    compiled = changed(resolved, compile={"torch_compile": "step"})
    world = how["tp"] * how.get("dp", 1) * how.get("cp", 1)
    result = ranks.run(world, run, compiled, weights_of(resolved))
    check_course([course for course, _ in result], reference(resolved, STEPS), resolved)
    assert {graphs for _, graphs in result} == {1}


@pytest.mark.parametrize(
    ("how", "parts"),
    [
        ({"tp": 1, "dp": 2, "ep": 2, "micro": 1, "remat": "full"}, True),
        ({"tp": 1}, "step"),
        pytest.param(
            {"tp": 2, "dp": 2, "ep": 2, "micro": 2, "sp": True, "shard": "zero1"}, "step", marks=pytest.mark.slow
        ),
        pytest.param({"tp": 1, "dp": 2, "micro": 1, "shard": "full"}, True, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_compiled_experts_with_room_for_all_tokens_train_as_transformers_does(
    ranks: RankPool, how: dict[str, Any], parts: Any
) -> None:
    config = {"num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 10}
    resolved = layout("gqa2", **how, family="qwen3_moe", config=config, moe_dispatch="capacity", moe_capacity_factor=2)
    compiled = changed(resolved, compile={"torch_compile": parts})
    result = ranks.run(how["tp"] * how.get("dp", 1), run, compiled, weights_of(resolved))
    check_course([course for course, _ in result], reference(resolved, STEPS), resolved)
    assert {graphs for _, graphs in result} == {1}


def collectives_of_a_step(backend: Backend, resolved: Resolved) -> list[Counter[str]]:
    """Train a step; count the collectives of the graph forward and of the graph backward."""
    torch._dynamo.reset()
    counts: list[Counter[str]] = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        names = (str(node.target).split(".")[1] for node in graph.graph.nodes if "c10d" in str(node.target))
        counts.append(Counter(name for name in names if name != "wait_tensor"))
        return make_boxed_func(graph.forward)

    compiler = aot_autograd(fw_compiler=count, partition_fn=min_cut_rematerialization_partition)
    with patch.object(backend, "compiler", compiler):
        run_ours(backend, resolved, 1, weights_of(resolved))
    return counts


@pytest.mark.parametrize(("shard", "again"), one_in(2, [("full", 4), ("grad_op", 0)]))
def test_a_graph_gathers_each_unit_once_and_again_only_if_units_are_freed(
    ranks: RankPool, shard: str, again: int
) -> None:
    """Units are 2 blocks, embedding, norm and head; the backward pass needs no row of the embedding."""
    two = {"num_hidden_layers": 2}
    resolved = changed(layout("gqa2", tp=1, dp=2, micro=1, shard=shard, config=two), compile={"torch_compile": "step"})
    for forward, backward in ranks.run(2, collectives_of_a_step, resolved):
        assert forward == {"all_gather_into_tensor": 5}
        assert backward == {"reduce_scatter_tensor": 5} | ({"all_gather_into_tensor": again} if again else {})


@pytest.mark.parametrize(("parts", "dropout"), one_in(3, [(True, 0.3), (True, 0.0), ("step", 0.0), ("step", 0.3)]))
def test_compiled_passes_with_adapters_train_as_plain_ones(ranks: RankPool, parts: Any, dropout: float) -> None:
    """The first block has a graph of its own, since its input has no gradient."""
    plain = layout("gqa2", tp=1, remat="full", micro=2, config=LAYERS)
    lora = {"method": "lora", "r": 4, "targets": ("q_proj", "v_proj", "down_proj"), "dropout": dropout}
    resolved = changed(plain, finetune=lora)
    base = weights_of(resolved)
    given = {**base, **adapters_of(resolved, base)}
    ((course, graphs),) = ranks.run(1, run, changed(resolved, compile={"torch_compile": parts}), given)
    (expected,) = ranks.run(1, run_ours, resolved, STEPS, given)
    assert graphs == {True: 2, "step": 1}[parts]
    assert course.losses == pytest.approx(expected.losses, rel=0, abs=2e-6)
    assert course.norms == pytest.approx(expected.norms, rel=1e-5)


def train_compiled(backend: Backend, resolved: Resolved) -> None:
    torch._dynamo.reset()
    with patch.object(backend, "compiler", "aot_eager"):
        train_rank(backend, resolved)


@pytest.mark.parametrize(("shard", "how"), [*one_in(3, [("zero1", True), ("full", "step"), ("full", True)])])
def test_compiled_runs_and_plain_ones_go_on_from_each_others_checkpoints(
    ranks: RankPool, tmp_path: Path, shard: str, how: bool | str
) -> None:
    data = {"source": "tokens", "path": str(token_file(tmp_path / "rows.npy", 16)), "shuffle": True}

    def part(folder: str, steps: int, *, compiled: bool) -> Resolved:
        return run_plan(
            tmp_path / folder,
            data,
            steps=steps,
            parallel={"tp": 1, "dp": 2, "shard": shard},
            optim={"decay_steps": 4},
            checkpoint={"every": 2, "resume": "auto"},
            compile={"torch_compile": compiled and how},
        )

    ranks.run(2, train_rank, part("plain", 4, compiled=False))
    ranks.run(2, train_compiled, part("half", 2, compiled=True))
    ranks.run(2, train_rank, part("half", 4, compiled=False))
    ranks.run(2, train_rank, part("other half", 2, compiled=False))
    ranks.run(2, train_compiled, part("other half", 4, compiled=True))
    losses, *others = ([line["loss"] for line in records(tmp_path / name)] for name in ("plain", "half", "other half"))
    for result in others:
        assert result == pytest.approx(losses, abs=2e-6)


class _Lazy:
    name, compiler, collectives, kernels = "xla", XlaBackend.compiler, None, PlainKernels()
    binding = Binding()

    def compile_kernels(self) -> None:
        """Do nothing, as a device that compiles whole steps."""


def test_a_device_that_compiles_whole_steps_refuses() -> None:
    resolved = changed(layout("gqa2", tp=1), compile={"torch_compile": True})
    with pytest.raises(ConfigError, match=r"compile\.torch_compile.*the backend xla records whole steps"):
        build_meta(resolved, _Lazy(), Mesh.build(1, 0))  # type: ignore[arg-type]


def test_a_device_whose_memory_no_peer_reaches_joins_no_products() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.async_tp.*but backend\.name=xla"):
        Backend.overlap_products(_Lazy(), Mesh.build(1, 0).tp)  # type: ignore[arg-type]
