"""Stages of a model: each layer once, under its name, with the weights that it has in the whole model."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nxtrain.backends.cpu import CpuBackend
from nxtrain.common.family import find_family
from nxtrain.common.mesh import Mesh
from nxtrain.common.sharding import ParamTable
from nxtrain.common.stages import LayerCosts, StagePart, split_layers, split_layers_at
from nxtrain.nn.init import draw
from nxtrain.train.build import build_meta, fill_model, parts_of
from tests.support.models import plan


def sizes(parts: tuple[StagePart, ...]) -> list[int]:
    return [len(part.blocks) for part in parts]


@given(st.data())
def test_every_cut_has_each_block_once_and_no_dearer_part_than_another(data: st.DataObject) -> None:
    """Against all cuts of small models."""
    num_parts = data.draw(st.integers(1, 4))
    num_blocks = data.draw(st.integers(num_parts, 9))
    costs = LayerCosts(*data.draw(st.tuples(st.integers(0, 30), st.integers(1, 9), st.integers(0, 30))))
    parts = split_layers(num_blocks, num_parts, costs)
    assert list(chain(*(part.blocks for part in parts))) == list(range(num_blocks))
    assert [part.first for part in parts] == [True] + [False] * (num_parts - 1)
    assert [part.last for part in parts] == [False] * (num_parts - 1) + [True]
    assert dearest(sizes(parts), costs) == min(dearest(other, costs) for other in shares(num_blocks, num_parts))


def dearest(blocks: list[int], costs: LayerCosts) -> int:
    spent = [number * costs.block for number in blocks]
    spent[0] += costs.embedding
    spent[-1] += costs.head
    return max(spent)


def shares(total: int, number: int) -> list[list[int]]:
    if number == 1:
        return [[total]]
    return [[first, *rest] for first in range(1, total - number + 2) for rest in shares(total - first, number - 1)]


@pytest.mark.parametrize(
    ("preset", "num_parts", "expected"),
    [
        ("llama2-70b", 8, [10] * 8),
        ("llama2-7b", 4, [8] * 4),
        ("llama3.1-405b", 8, [15, 16, 16, 16, 16, 16, 16, 15]),
        ("llama3.2-1b", 4, [5, 5, 5, 1]),  # a head as dear as four blocks
    ],
)
def test_stages_are_balanced_by_what_they_compute(preset: str, num_parts: int, expected: list[int]) -> None:
    family = find_family("llama")
    model = family.preset(preset)
    assert (
        sizes(split_layers(model.num_hidden_layers, num_parts, family.dimensions(model).layer_costs(4096))) == expected
    )


def test_configured_cuts_are_taken_as_they_are() -> None:
    assert sizes(split_layers_at(80, (18, 39, 60))) == [18, 21, 21, 20]
    resolved = plan("gqa", parallel={"pp": 2, "pipeline_cuts": (1,)}, model={"config": {"num_hidden_layers": 5}})
    assert [parts_of(resolved, Mesh.build(2, rank, pp=2))[0].blocks for rank in (0, 1)] == [range(1), range(1, 5)]


@pytest.mark.parametrize("virtual_pp", [1, 2])
@pytest.mark.parametrize("shape", ["gqa", "tied"])
def test_the_stages_hold_each_parameter_once_under_its_name_and_with_its_weights(shape: str, virtual_pp: int) -> None:
    """But for the output projection of a tied model, a copy of the embedding that no count and no norm has twice."""
    layers = {"config": {"num_hidden_layers": 7}}
    whole = drawn(shape, Mesh.build(2, 1, tp=2), {"tp": 2}, layers)
    results: dict[str, Tensor] = {}
    for stage in range(3):
        mesh = Mesh.build(6, 2 * stage + 1, tp=2, pp=3)
        part = drawn(shape, mesh, {"tp": 2, "pp": 3, "virtual_pp": virtual_pp}, layers)
        assert not part.keys() & results.keys()
        results |= part
    copy = results.pop("lm_head.weight") if shape == "tied" else None
    assert results.keys() == whole.keys()
    assert all(torch.equal(results[name], tensor) for name, tensor in whole.items())
    if copy is not None:
        assert torch.equal(copy, whole["model.embed_tokens.weight"])


def drawn(shape: str, mesh: Mesh, parallel: dict[str, int], model: dict[str, dict[str, int]]) -> dict[str, Tensor]:
    resolved, backend = plan(shape, parallel=parallel, model=model), CpuBackend()
    built = build_meta(resolved, backend, mesh)
    fill_model(resolved, built, backend, mesh, draw(ParamTable.of(built), mesh.tp, 0))
    return dict(built.named_parameters())
