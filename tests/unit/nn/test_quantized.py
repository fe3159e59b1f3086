"""Cuts of matrices whose blocks of adjacent weights share a scale."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nxtrain.common.errors import ConfigError
from nxtrain.common.mesh import Axis
from nxtrain.common.sharding import Init, Segment, ShardSpec
from nxtrain.config.finetune import BLOCK, quantized_cut
from nxtrain.nn.quantized import quantize
from nxtrain.parallel.linear import RowLinear
from nxtrain.parallel.regions import TensorParallel

SIZES = st.sampled_from([1, 2, 6, 8, 16, 32, 40, 48, 64, 96, 128, 192, 256])


def axis(size: int, rank: int) -> Axis:
    return Axis("tp", rank, (tuple(range(size)),))


def holds_whole_blocks(spec: ShardSpec, at: Axis) -> bool:
    """By the number of each weight: a rank holds all weights of a block or none."""
    for piece in spec.pieces(at):
        shape = spec.global_shape(piece.segment)
        blocks = torch.arange(shape[0] * shape[1]).view(shape) // BLOCK
        held = blocks.narrow(spec.dim or 0, piece.start, piece.length).flatten()
        if piece.length * at.size != piece.segment.size * piece.copies or not torch.equal(
            held.unique(return_counts=True)[1], torch.full((len(held) // BLOCK,), BLOCK)
        ):
            return False
    return True


@settings(max_examples=200)
@given(SIZES, SIZES, st.sampled_from([0, 1]), st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_a_cut_is_allowed_where_every_rank_holds_whole_blocks(
    rows: int, columns: int, dim: int, size: int, fused: bool
) -> None:
    segments = (Segment("gate", rows), Segment("up", rows)) if fused and dim == 0 else ()
    spec = ShardSpec((rows * max(1, len(segments)), columns), dim=dim, segments=segments)
    expected = all(holds_whole_blocks(spec, axis(size, rank)) for rank in range(size))
    assert spec.has_whole_runs(axis(size, 0), BLOCK) == expected


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_matrix_of_no_whole_blocks_is_refused_as_one_that_no_layout_can_quantize(size: int, dim: int) -> None:
    (problem,) = quantized_cut("o_proj", ShardSpec((20, 66), dim=dim), axis(size, 0))
    assert problem.key == "finetune.method"
    assert (
        problem.reason
        == "qlora quantizes blocks of 64 weights, and o_proj of (20, 66) has 1,320 weights, which 64 does not divide"
    )
    assert problem.hint == "use finetune.method=lora"


def test_a_cut_inside_a_block_is_refused_with_the_matrix_and_the_way_out() -> None:
    class Model(nn.Module):
        def __init__(self, tp: TensorParallel) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.ModuleDict({"down_proj": RowLinear(96, 64, Init(), tp)})])

    tp = cast(TensorParallel, SimpleNamespace(axis=axis(2, 0), dtype=torch.float32, empty=lambda spec: nn.Parameter()))
    with pytest.raises(ConfigError) as refused:
        quantize(Model(tp), tp)
    message = str(refused.value)
    assert "parallel.tp: tp=2 cuts down_proj of (64, 96) inside a block of 64 weights, which share a scale" in message
    assert "a rank has 96 / 2 = 48 weights of each row" in message
    assert "use a smaller parallel.tp, or finetune.method=lora" in message
