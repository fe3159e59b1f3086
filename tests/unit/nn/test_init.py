"""First weights: the same bits for a seed whatever the layout, and never more memory than a rank's own part."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from nxtrain.common.mesh import Mesh
from nxtrain.common.sharding import Init, ShardSpec, global_name
from nxtrain.config.check import Resolved
from nxtrain.nn.init import draw_shard
from tests.support.models import SHAPES, plan
from tests.support.parity import layout, table_of, whole

ALONE = Mesh.build(1, 0).tp
GOLDEN_VALUES = [-0.00961301569, 0.0538624115, 0.00191343809]
GOLDEN_DIGEST = "89084c06cee0b0fd9a628699c11a4f94bd9cb206d56be990d0b12c4df9157f2b"
WEIGHT = "model.layers.0.self_attn.q_proj.weight"


def drawn(resolved: Resolved, seed: int = 0) -> dict[str, Tensor]:
    """The whole tensors that the ranks of a layout draw together, by global name."""
    tp, pp = resolved.config.parallel.tp, resolved.config.parallel.pp
    by_rank = []
    for rank in range(tp * pp):
        mesh = Mesh.build(tp * pp, rank, tp=tp, pp=pp)
        shards = {}
        for name, spec in table_of(resolved, mesh).items():
            shards[name] = torch.zeros(spec.local_shape(mesh.tp))
            draw_shard(shards[name], name, spec, mesh.tp, seed)
        by_rank.append(shards)
    return whole(by_rank, resolved)


def one(name: str = WEIGHT, seed: int = 0, shape: tuple[int, int] = (300, 520), std: float = 1.0) -> Tensor:
    """One tensor as a single rank draws it."""
    local = torch.zeros(shape)
    draw_shard(local, name, ShardSpec(shape, dim=0, init=Init(std=std)), ALONE, seed)
    return local


@pytest.mark.parametrize("shape", ["gqa2", "mqa", "odd", "tied"])
def test_tp_and_fusing_do_not_change_a_bit(shape: str) -> None:
    expected = drawn(layout(shape, tp=1, fused_qkv=False, fused_gate_up=False))
    for tp in (1, 2, 4):
        actual = drawn(layout(shape, tp=tp))
        assert actual.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(actual[name], tensor), (tp, name)


@pytest.mark.parametrize("shape", ["gqa2", "tied"])
def test_stages_do_not_change_a_bit(shape: str) -> None:
    depth = {"num_hidden_layers": 5}
    expected = drawn(layout(shape, tp=1, config=depth))
    every: list[dict[str, Any]] = [
        {"tp": 1, "pp": 2},
        {"tp": 2, "pp": 2, "virtual_pp": 2},
        {"tp": 1, "pp": 3, "cuts": (3, 4)},
    ]
    for stages in every:
        actual = drawn(layout(shape, **stages, config=depth))
        assert actual.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(actual[name], tensor), (stages, name)


def test_the_copy_of_a_tied_embedding_begins_as_its_equal() -> None:
    resolved = layout("tied", tp=2, pp=2)
    drafts = []
    for rank, name in [(1, "model.embed_tokens.weight"), (3, "lm_head.weight")]:  # the second of tp, on either stage
        mesh = Mesh.build(4, rank, tp=2, pp=2)
        spec = table_of(resolved, mesh)[name]
        drafts.append(torch.zeros(spec.local_shape(mesh.tp)))
        draw_shard(drafts[-1], name, spec, mesh.tp, seed=0)
    assert torch.equal(*drafts)
    assert torch.count_nonzero(drafts[0])


@pytest.mark.parametrize(("dim", "tp"), [(0, 2), (0, 7), (1, 4), (1, 8)])
def test_any_cut_across_the_tiles_is_the_same_part_of_the_whole(dim: int, tp: int) -> None:
    expected = one()
    for rank in range(tp):
        axis = Mesh.build(tp, rank, tp=tp).tp
        spec = ShardSpec((300, 520), dim=dim, init=Init(std=1.0))
        local = torch.zeros(spec.local_shape(axis))
        draw_shard(local, WEIGHT, spec, axis, seed=0)
        assert torch.equal(local, spec.shard({"": expected}, axis)), rank


def test_a_weight_does_not_depend_on_what_else_is_in_the_model() -> None:
    few = drawn(plan("gqa", model={"config": {"num_hidden_layers": 1}, "init": "normal"}))
    many = drawn(plan("gqa", model={"config": {"num_hidden_layers": 3}, "init": "normal"}))
    assert few.keys() < many.keys()
    assert all(torch.equal(few[name], many[name]) for name in few)


def test_names_seeds_and_tiles_are_independent() -> None:
    base = one()
    for other in (one(seed=1), one(name=WEIGHT.replace("0", "1"))):
        assert abs(torch.corrcoef(torch.stack([base.flatten(), other.flatten()]))[0, 1].item()) < 0.01
    tiles = torch.stack([base[:256, :256].flatten(), base[:256, 256:512].flatten()])
    assert abs(torch.corrcoef(tiles)[0, 1].item()) < 0.02


def test_the_weights_of_a_seed_are_what_they_always_were() -> None:
    """A change of name, key, tile or distribution would silently give every seed another model."""
    few = one(std=0.02)[::60, ::60]  # of every tile; none from the tail, whose last bit is up to the C library
    assert few.abs().max() < 3 * 0.02
    assert few[0, :3].tolist() == pytest.approx(GOLDEN_VALUES, rel=1e-6)
    assert hashlib.sha256(few.numpy().astype("<f4").tobytes()).hexdigest() == GOLDEN_DIGEST


@pytest.mark.parametrize("init", ["scaled", "normal"])
def test_standard_deviations_are_the_published_ones(init: str) -> None:
    """Range on every matrix; on the projections into the residual stream range / sqrt(2 * layers), when scaled."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 512, "initializer_range": 0.03}
    resolved = plan("mha", model={"init": init, "config": {**sizes, "num_hidden_layers": 3}})
    for name, tensor in drawn(resolved).items():
        if "norm" in name:
            assert torch.equal(tensor, torch.ones(256))
            continue
        into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        expected = 0.03 / math.sqrt(6) if init == "scaled" and into_residual else 0.03
        assert tensor.std().item() == pytest.approx(expected, rel=0.01), name
        assert abs(tensor.mean().item()) < 0.02 * expected, name


@pytest.mark.parametrize("shape", SHAPES)
def test_every_tensor_of_a_model_is_drawn(shape: str) -> None:
    resolved = layout(shape, tp=4)
    names = {
        global_name(name, segment)
        for name, spec in table_of(resolved, Mesh.build(4, 0, tp=4)).items()
        for segment in spec.segments
    }
    tensors = drawn(resolved)
    assert tensors.keys() == names
    assert all((tensor == 0).sum() < 3 for tensor in tensors.values())


def test_the_uniform_draw_has_its_deviation_and_its_bounds() -> None:
    """As PEFT draws an adapter's A: up to 1 / sqrt(fan in), evenly."""
    spec = ShardSpec((300, 520), dim=1, init=Init("uniform", 1 / math.sqrt(3 * 520)))
    local = torch.zeros(300, 520)
    draw_shard(local, "layer.lora_A", spec, ALONE, 0)
    bound = 1 / math.sqrt(520)
    assert 0.999 * bound < local.abs().max() <= bound * (1 + 1e-6)
    counts = torch.histc(local, 10, -bound, bound)
    assert counts.min() > 0.97 * local.numel() / 10
    assert abs(float(local.mean())) < 0.005 * bound
