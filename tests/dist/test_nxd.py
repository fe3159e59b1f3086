"""The layers of NeuronX Distributed, its own code on gloo, do what the native ones do.

`tests/support/nxd_cpu.py` says how to run these. Without sequence parallelism both sets add the same numbers in one
order, and every result is equal bit for bit. With it, NxD's embedding looks the tokens up batch first, so that the
gradient of a token that occurs several times is summed in another order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nxtrain.backends import choose_layers
from nxtrain.backends.base import Backend
from nxtrain.common.errors import BackendError
from nxtrain.common.mesh import Mesh
from nxtrain.common.sharding import Init, Segment
from nxtrain.config.check import Resolved
from nxtrain.parallel.native import NativeLayers
from nxtrain.parallel.regions import TensorParallel
from nxtrain.train.build import build_meta
from tests.support.models import changed, filled, our_model, random, weights_of
from tests.support.parity import (
    Course,
    Gradient,
    batches,
    gradient,
    layout,
    local_batch,
    rank_gradient,
    reference,
    relative_errors,
    run_ours,
    start,
)
from tests.support.ranks import RankPool

pytestmark = pytest.mark.nxd

STEPS = 20
BF16_ROUNDING = 2.0**-8
EMBEDDING = "model.embed_tokens.weight"

LAYOUTS: list[dict[str, Any]] = [
    {"shape": "gqa2", "tp": 1},
    {"shape": "gqa2", "tp": 2},
    {"shape": "gqa2", "tp": 2, "sp": True},
    {"shape": "gqa2", "tp": 1, "dp": 2, "micro": 2},
    {"shape": "gqa2", "tp": 1, "dp": 2, "micro": 1},
    {"shape": "gqa2", "tp": 1, "dp": 2, "micro": 2, "shard": "zero1"},
    {"shape": "gqa2", "tp": 2, "dp": 2, "micro": 2, "sp": True},
    {"shape": "gqa2", "tp": 2, "dp": 2, "micro": 1, "shard": "zero1"},
    {"shape": "odd", "tp": 2},  # padded vocabulary and feed-forward
    {"shape": "odd", "tp": 2, "sp": True},
    {"shape": "mqa", "tp": 2, "sp": True},  # one K/V head on both ranks
    {"shape": "tied", "tp": 2, "sp": True},
    # Biases and norms of heads.
    *({"shape": "mqa", "tp": 2, "sp": sp, "family": family} for family in ("qwen2", "qwen3") for sp in (False, True)),
    # Stages of five blocks.
    {"shape": "gqa2", "tp": 1, "pp": 2, "micro": 1},
    {"shape": "tied", "tp": 1, "pp": 2, "dp": 2, "shard": "zero1", "virtual_pp": 2, "micro": 1},
    {"shape": "mqa", "tp": 2, "pp": 2, "sp": True, "virtual_pp": 2, "micro": 1},
    {"shape": "odd", "tp": 2, "pp": 2, "dp": 2, "sp": True, "shard": "zero1", "micro": 1},
]


def distance(a: list[Course], b: list[Course]) -> tuple[float, float]:
    """Largest difference of losses, and largest relative one of norms."""
    pairs = list(zip(a, b, strict=True))
    losses = [abs(x - y) for p, q in pairs for x, y in zip(p.losses, q.losses, strict=True)]
    norms = [abs(x - y) / y for p, q in pairs for x, y in zip(p.norms, q.norms, strict=True)]
    return max(losses), max(norms)


def equal(a: list[Course], b: list[Course]) -> bool:
    same = all((p.losses, p.norms) == (q.losses, q.norms) for p, q in zip(a, b, strict=True))
    return same and all(torch.equal(p.weights[n], w) for p, q in zip(a, b, strict=True) for n, w in q.weights.items())


@pytest.mark.parametrize("cut", LAYOUTS, ids=str)
def test_twenty_float32_steps_equal_those_of_the_native_layers(
    ranks: RankPool, nxd_ranks: RankPool, cut: dict[str, Any]
) -> None:
    depth: dict[str, Any] = {"config": {"num_hidden_layers": 5}} if "pp" in cut else {}
    resolved = layout(**cut, **depth)
    world = cut["tp"] * cut.get("pp", 1) * cut.get("dp", 1)
    job = (world, run_ours, resolved, STEPS, weights_of(resolved))
    native, nxd = ranks.run(*job), nxd_ranks.run(*job)
    losses, norms = distance(nxd, native)
    assert losses < 1e-6
    if not cut.get("sp"):
        assert equal(nxd, native)
        return
    # Sequence parallel layers add in another order, and 20 steps amplify a last bit: by how much, float64 tells.
    _, rounding = distance(native, [reference(resolved, STEPS, weights=weights_of(resolved))] * world)
    assert norms < max(1e-6, rounding)


@pytest.mark.parametrize(("tp", "dp", "shard"), [(1, 1, "none"), (2, 1, "none"), (2, 2, "none"), (1, 2, "zero1")])
def test_twenty_bfloat16_steps_are_equal_bit_for_bit(
    ranks: RankPool, nxd_ranks: RankPool, tp: int, dp: int, shard: str
) -> None:
    resolved = layout("odd", tp=tp, dp=dp, params="bf16", shard=shard, micro=2)
    job = (tp * dp, run_ours, resolved, STEPS, weights_of(resolved))
    assert equal(nxd_ranks.run(*job), ranks.run(*job))


@pytest.mark.parametrize("shape", ["gqa2", "odd"])
def test_bfloat16_steps_under_sequence_parallelism_differ_by_rounding_only(
    ranks: RankPool, nxd_ranks: RankPool, shape: str
) -> None:
    """In the first gradient only the embedding's sums differ; then as far as two native layouts, which round too."""
    resolved, alone = layout(shape, tp=2, sp=True, params="bf16"), layout(shape, tp=1, params="bf16")
    weights = weights_of(resolved)
    for one, other in zip(
        nxd_ranks.run(2, rank_gradient, resolved, weights), ranks.run(2, rank_gradient, resolved, weights), strict=True
    ):
        assert one.loss == other.loss
        differing = {name for name, grad in other.shards.items() if not torch.equal(one.shards[name], grad)}
        assert differing <= {EMBEDDING}
        assert relative_errors(one.shards, other.shards)[EMBEDDING] < BF16_ROUNDING
    nxd, native = (pool.run(2, run_ours, resolved, STEPS, weights) for pool in (nxd_ranks, ranks))
    rounded = distance(native[:1], ranks.run(1, run_ours, alone, STEPS, weights))
    assert all(result < 2 * other for result, other in zip(distance(nxd, native), rounded, strict=True))


def rank_state(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    mesh = Mesh.build(backend.world, backend.rank, tp=resolved.config.parallel.tp)
    return dict(our_model(resolved, backend, mesh, weights).state_dict())


SHAPES = [("gqa2", 1), ("gqa2", 2), ("odd", 2), ("mqa", 2), ("tied", 2), ("gqa2", 4), ("odd", 4)]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    ("shape", "tp", "family"), [*((*shape, "llama") for shape in SHAPES), ("gqa2", 4, "qwen2"), ("gqa2", 4, "qwen3")]
)
def test_a_rank_holds_the_same_names_shapes_and_values(
    ranks: RankPool, nxd_ranks: RankPool, shape: str, tp: int, family: str, fused: bool
) -> None:
    resolved = layout(shape, tp=tp, sp=tp == 4, fused_qkv=fused, fused_gate_up=fused, family=family)
    job = (tp, rank_state, resolved, weights_of(resolved))
    for native, nxd in zip(ranks.run(*job), nxd_ranks.run(*job), strict=True):
        assert list(nxd) == list(native)
        assert all(torch.equal(nxd[name], value) and nxd[name].dtype == value.dtype for name, value in native.items())


def attributes(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    names = (
        *("tensor_model_parallel", "partition_dim", "partition_stride", "num_partitions", "rank_ordering"),
        *("sequence_parallel_enabled", "shared"),
    )
    model = start(backend, resolved, weights).model
    return {name: {a: getattr(p, a) for a in names} for name, p in model.named_parameters()}


@pytest.mark.parametrize("fused", [True, False])
def test_what_nxd_reads_from_a_parameter_follows_from_how_it_is_cut(nxd_ranks: RankPool, fused: bool) -> None:
    resolved = layout("gqa2", tp=2, sp=True, fused_qkv=fused, fused_gate_up=fused)
    result, _ = nxd_ranks.run(2, attributes, resolved, weights_of(resolved))
    cut = {"tensor_model_parallel": True, "num_partitions": 2, "rank_ordering": None}
    whole = {"tensor_model_parallel": False, "num_partitions": 1, "rank_ordering": None}
    plain = {"sequence_parallel_enabled": False, "shared": False}
    column = {**cut, **plain, "partition_dim": 0, "partition_stride": 1}
    row = {**column, "partition_dim": 1}
    norm = {**whole, "shared": False, "sequence_parallel_enabled": True, "partition_dim": -1, "partition_stride": 1}
    assert result[EMBEDDING] == result["lm_head.weight"] == column
    assert result["model.norm.weight"] == result["model.layers.1.input_layernorm.weight"] == norm
    assert result["model.layers.0.self_attn.o_proj.weight"] == result["model.layers.0.mlp.down_proj.weight"] == row
    if fused:
        assert result["model.layers.0.mlp.gate_up_proj.weight"] == {**column, "partition_stride": 2}
        assert result["model.layers.0.self_attn.qkv_proj.weight"] == column
    else:
        assert (
            result["model.layers.0.mlp.gate_proj.weight"] == result["model.layers.0.self_attn.q_proj.weight"] == column
        )


def both_norms(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor]) -> tuple[float, float]:
    """Our norm of a gradient, and what NxD's function makes of the same, by the attributes of the parameters."""
    from neuronx_distributed.parallel_layers.grads import get_grad_norm

    state = start(backend, resolved, weights)
    (batch,) = batches(resolved, 1)
    result: Gradient = gradient(state, local_batch(state, batch, resolved.config.train.micro_batch))
    for name, parameter in state.model.named_parameters():
        parameter.grad = result.shards[name]
    return result.norm, float(get_grad_norm(parameters=list(state.model.parameters())))


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("shape", ["gqa2", "odd"])
def test_nxd_computes_our_norm_from_our_parameters(nxd_ranks: RankPool, shape: str, sp: bool) -> None:
    """4.2: NxD's own fused K/V projection loses its attributes, and counts half in its norm at tp 2."""
    resolved = layout(shape, tp=2, sp=sp)
    for ours, theirs in nxd_ranks.run(2, both_norms, resolved, weights_of(resolved)):
        assert theirs == pytest.approx(ours, rel=1e-6)


def layer_types(backend: Backend, resolved: Resolved) -> dict[str, tuple[str, bool]]:
    """Of each layer that is cut: its class, and whether NxD made it."""
    model = build_meta(resolved, backend, Mesh.build(backend.world, backend.rank, tp=backend.world))
    modules = {name: module for name, module in model.named_modules() if hasattr(module, "specs")}
    return {name: (type(m).__name__, _is_vendor(m)) for name, m in modules.items()}


def _is_vendor(module: nn.Module) -> bool:
    return any(base.__module__.startswith("neuronx_distributed.") for base in type(module).__mro__)


def test_the_model_is_made_of_nxd_layers_but_for_norms_and_head(nxd_ranks: RankPool) -> None:
    actual, _ = nxd_ranks.run(2, layer_types, layout("gqa2", tp=2))
    vendor = {name.rpartition(".")[2] for name, (_, theirs) in actual.items() if theirs}
    ours = {name.rpartition(".")[2] for name, (_, theirs) in actual.items() if not theirs}
    assert vendor == {"embed_tokens", "qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    assert ours == {"input_layernorm", "post_attention_layernorm", "norm", "lm_head"}


def strided(backend: Backend, sp: bool) -> list[Tensor]:
    """Outputs and weight gradients of column, row and embedding for transposed inputs and gradients."""
    mesh = Mesh.build(backend.world, backend.rank, tp=backend.world)
    plain = NativeLayers(TensorParallel(mesh.tp, backend.collectives, backend.kernels, torch.float32, sp))
    layers = backend.binding.layers(plain, mesh, torch.float32)
    size, cut = backend.world, 8 // backend.world
    with torch.device("meta"):
        column = layers.column(6, (Segment("", 16),), Init())
        row, embedding = layers.row(16, 6, Init()), layers.embedding(16, 6, Init())
    results = []
    for layer, width, is_cut in ((column, 6, sp), (row, 16 // size, False), (embedding, 0, False)):
        (spec,) = layer.specs.values()  # type: ignore[operator]
        filled(layer, mesh.tp, {"": random(*spec.shape)})
        length = cut if is_cut else 8
        x = random(2, length, width, seed=backend.rank) if width else torch.arange(16).reshape(2, 8)
        out = layer(x.transpose(0, 1).requires_grad_(bool(width)))
        out.backward(random(2, out.shape[0], out.shape[2], seed=backend.rank + 9).transpose(0, 1))
        assert layer.weight.grad is not None
        results += [out.detach(), layer.weight.grad]
    return results


@pytest.mark.parametrize("sp", [False, True])
def test_inputs_and_gradients_may_have_any_strides(ranks: RankPool, nxd_ranks: RankPool, sp: bool) -> None:
    for native, nxd in zip(ranks.run(2, strided, sp), nxd_ranks.run(2, strided, sp), strict=True):
        for ours, theirs in zip(native, nxd, strict=True):
            torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-6)


def refused_strangers(backend: Backend, resolved: Resolved) -> list[str]:
    """Errors for ranks in another order than NxD's, and for a mesh of another tp after its groups were made."""
    said = []
    meshes = [Mesh.build(4, backend.rank, tp=2, order=order) for order in ((0, 2, 1, 3), ())]
    for mesh in (meshes[0], meshes[1], Mesh.build(4, backend.rank, tp=4)):
        try:
            build_meta(resolved, backend, mesh)
        except BackendError as error:
            said.append(str(error))
        else:
            said.append("")
    return said


def test_a_mesh_that_nxd_does_not_share_is_refused(nxd_ranks: RankPool) -> None:
    for strided, same, other_tp in nxd_ranks.run(4, refused_strangers, layout("gqa2", tp=2, dp=2)):
        assert "the tp groups [0, 1], [2, 3], but this run has [0, 2], [1, 3]" in strided
        assert same == ""
        assert "the tp groups [0, 1], [2, 3], but this run has [0, 1, 2, 3]" in other_tp


def rank_orders(backend: Backend, cases: list[tuple[str, int, int, int, int, int]]) -> list[tuple[int, ...] | str]:
    """NxD's order of ranks in pretended worlds: chip, world, ranks per node, physical cores each, tp, pp."""
    import os

    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from nxtrain.backends.neuron.nxd.groups import rank_order
    from tests.support.nxd_cpu import PLATFORM

    results: list[tuple[int, ...] | str] = []
    for chip, world, per_node, lnc, tp, pp in cases:
        os.environ.update({PLATFORM: chip, "LOCAL_WORLD_SIZE": str(per_node)})
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
        try:
            results.append(rank_order(tp=tp, pp=pp, lnc=lnc))
        except BackendError as error:
            results.append(str(error))
        finally:
            dist.destroy_process_group()
            del os.environ[PLATFORM]
    return results


def test_the_order_of_ranks_is_that_of_the_machine(nxd_ranks: RankPool) -> None:
    cases = [
        ("trn1", 64, 32, 1, 8, 2),
        ("trn1", 64, 32, 1, 4, 1),
        ("trn2", 128, 64, 2, 32, 1),
        ("trn2", 128, 64, 2, 32, 2),
        ("trn1", 64, 32, 1, 4, 16),
        ("trn1", 4, 2, 1, 4, 1),
        ("trn9", 8, 8, 1, 2, 1),
    ]
    (result,) = nxd_ranks.run(1, rank_orders, cases)
    plain, strided, opposite, staged, *impossible = result
    assert plain == tuple(range(64))
    # Eight groups of four on each node, their ranks eight apart.
    assert strided == tuple(node + start + 8 * i for node in (0, 32) for start in range(8) for i in range(4))
    # The first and the last quarter of a node together, and those between.
    rows = [list(range(first, first + 16)) for first in range(0, 128, 16)]
    assert opposite == tuple(rank for row in (0, 3, 1, 2, 4, 7, 5, 6) for rank in rows[row])
    assert staged == opposite
    for said, degrees in zip(
        impossible, ("tp=4, pp=16 over 64", "tp=4, pp=1 over 4", "tp=2, pp=1 over 8"), strict=True
    ):
        assert isinstance(said, str)
        assert f"cannot lay out {degrees} ranks on this instance" in said
    mesh = Mesh.build(64, 8, tp=4, order=strided)
    assert (mesh.tp.rank, mesh.dp.rank, mesh.tp.groups[0]) == (1, 0, (0, 8, 16, 24))


def choices(backend: Backend) -> list[str]:
    said = []
    for layers, name in (("nxd", "cpu"), ("auto", "cpu"), ("auto", "neuron"), ("native", "cpu")):
        said.append(": ".join(choose_layers(layers, name)))
    return said


def test_the_choice_is_said_with_its_reason(nxd_ranks: RankPool) -> None:
    (said,) = nxd_ranks.run(1, choices)
    version = said[0].split()[2]
    installed = f"neuronx-distributed {version} is installed"
    assert said == [
        f"nxd: {installed}",
        "native: ",
        f"nxd: {installed}",
        "native: backend.layers=native",
    ]


def test_a_second_run_in_a_process_makes_groups_of_its_own(nxd_ranks: RankPool) -> None:
    for tp, dp in ((2, 1), (1, 2), (2, 1)):
        resolved = changed(layout("gqa2", tp=tp, dp=dp, micro=4 // dp), optim={"clip": 1.0})
        first, second = nxd_ranks.run(2, run_ours, resolved, 1, weights_of(resolved))
        assert first.losses == second.losses
