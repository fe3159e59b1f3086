"""One pipeline stage cut out by hand, and the bound on the memory that its shard may take."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from torch import Tensor, nn

from nxtrain.backends.cpu import CpuBackend
from nxtrain.bench.materialize import Target, bench_materialize, judge
from nxtrain.bench.stage import keep_stage, stage_blocks
from nxtrain.errors import BackendError, ConfigError
from nxtrain.mesh import Mesh
from nxtrain.nn.init import draw
from nxtrain.sharding import ParamTable
from nxtrain.train.build import build_meta, fill_model
from tests.support.models import plan

GIB = 1 << 30
PLAN = plan("gqa", parallel={"tp": 2, "pp": 3}, model={"config": {"num_hidden_layers": 5}})
MESH = Mesh.build(6, 3, tp=2, pp=3)


def drawn(model: nn.Module, backend: CpuBackend) -> dict[str, Tensor]:
    fill_model(PLAN, model, backend, MESH, draw(ParamTable.of(model), MESH.tp, 0))
    return dict(model.named_parameters())


def test_layers_that_do_not_divide_are_cut_as_evenly_as_can_be() -> None:
    stages = [stage_blocks(126, 8, stage) for stage in range(8)]
    assert [len(stage) for stage in stages] == [16, 16, 16, 16, 16, 16, 15, 15]
    assert list(chain(*stages)) == list(range(126))


def test_the_stages_hold_each_parameter_once_under_its_name() -> None:
    backend = CpuBackend()
    names = [name for name, _ in build_meta(PLAN, backend, MESH).named_parameters()]
    stages = []
    for stage in range(3):
        model = build_meta(PLAN, backend, MESH)
        keep_stage(model, 3, stage)
        stages.append([name for name, _ in model.named_parameters()])
    assert list(chain(*stages)) == names
    assert stages[0][0] == "model.embed_tokens.weight"
    assert stages[1][0].startswith("model.layers.2.")
    assert stages[1][-1].startswith("model.layers.3.")
    assert stages[2][-2:] == ["model.norm.weight", "lm_head.weight"]


def test_a_stage_alone_has_the_weights_that_it_has_in_the_model() -> None:
    backend = CpuBackend()
    whole = drawn(build_meta(PLAN, backend, MESH), backend)
    model = build_meta(PLAN, backend, MESH)
    keep_stage(model, 3, 1)
    part = drawn(model, backend)
    assert len(part) == 2 * len(whole.keys() - {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}) / 5
    assert all(torch.equal(whole[name], tensor) for name, tensor in part.items())


@pytest.mark.parametrize(("shard", "peak", "within"), [(10, 14, True), (10, 14.1, False), (1000, 1300, True)])
def test_the_bound_is_1_3_shards_and_one_gib(shard: float, peak: float, within: bool) -> None:
    found = judge({"shard_bytes": int(shard * GIB), "peak_bytes": int(peak * GIB)})
    assert found["bound_bytes"] == int(1.3 * int(shard * GIB)) + GIB
    assert found["within"] is within


def test_a_system_that_tells_no_peak_is_refused() -> None:
    with pytest.raises(BackendError, match="/proc"):
        judge({"shard_bytes": GIB, "peak_bytes": 0})


def test_a_rank_is_of_its_stage() -> None:
    target = Target("llama2-70b", tp=32, pp=8, stage=4)
    mesh = Mesh.build(256, target.rank, tp=32, pp=8)
    assert (mesh.pp.rank, mesh.tp.rank) == (4, 16)


@pytest.mark.parametrize(
    ("preset", "tp", "stage", "message"),
    [
        ("llama9", 32, None, "known: tiny"),
        ("llama2-70b", 24, None, "tp=24 does not divide"),
        ("llama2-70b", 32, 8, "use 0 to 7"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(preset: str, tp: int, stage: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bench_materialize(preset=preset, tp=tp, pp=8, stage=stage, as_json=True)
