"""Expert parallelism in a configuration: what divides what, and what goes together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nxtrain.common.dimensions import MoeShape
from nxtrain.common.errors import ConfigError
from nxtrain.config.check import resolve_config
from nxtrain.config.experts import experts
from nxtrain.config.load import load
from nxtrain.config.schema import RunConfig

SHARED = ("parallel.dp=12", "parallel.ep=4", "parallel.shard=hybrid", "parallel.shard_size=6")
"""Six ranks that share state cannot have whole groups of four with different experts."""


def config(ep: int, **sections: dict[str, Any]) -> RunConfig:
    """A configuration with expert parallelism."""
    return RunConfig.model_validate({**sections, "parallel": {"ep": ep, **sections.get("parallel", {})}})


def mixture(num_experts: int) -> MoeShape | None:
    """Experts of a model; None without any."""
    return MoeShape(num_experts, 1, 8) if num_experts else None


@pytest.mark.parametrize(
    ("given", "num_experts", "key", "reason", "hint"),
    [
        (config(2), 0, "parallel.ep", "the model has none", "use parallel.ep=1"),
        (config(4), 6, "parallel.ep", "4 does not divide the model's 6 experts", "use one of 1, 2, 3, 6"),
        (config(2, backend={"layers": "nxd"}), 4, "backend.layers", "ep=2 divides nxtrain's own experts", "use auto"),
        (
            config(2, compile={"torch_compile": True}),
            4,
            "compile.torch_compile",
            "the host reads the number of rows of each expert",
            "use false, or model.moe_dispatch=capacity",
        ),
        (
            config(2, compile={"torch_compile": True}, model={"moe_dispatch": "capacity"}, parallel={"shard": "full"}),
            4,
            "compile.torch_compile",
            "with shard=full divided experts are gathered inside of a block",
            "use false, parallel.shard=zero1, or parallel.ep=1",
        ),
    ],
)
def test_what_experts_exclude_is_one_problem_with_a_way_out(
    given: RunConfig, num_experts: int, key: str, reason: str, hint: str
) -> None:
    (problem,) = experts(given, mixture(num_experts))
    assert problem.key == key
    assert reason in problem.reason
    assert hint in problem.hint


@pytest.mark.parametrize(
    ("given", "num_experts"),
    [
        (config(1), 0),
        (config(2), 4),
        (config(4, parallel={"dp": 2, "cp": 2}), 4),
        (config(4, parallel={"dp": 16, "shard": "hybrid", "shard_size": 8}), 8),
        (config(4, parallel={"dp": 16, "shard": "hybrid", "shard_size": 1}), 8),
    ],
)
def test_degrees_that_fit_have_no_problem(given: RunConfig, num_experts: int) -> None:
    assert not [*experts(given, mixture(num_experts))]


@pytest.mark.parametrize("world", [None, 12])
@pytest.mark.parametrize(
    ("degrees", "key"),
    [(("parallel.dp=6", "parallel.cp=2", "parallel.ep=8"), "parallel.ep"), (SHARED, "parallel.shard_size")],
)
def test_ranks_that_experts_do_not_fit_are_one_problem(
    tmp_path: Path, degrees: tuple[str, ...], key: str, world: int | None
) -> None:
    (tmp_path / "run.toml").write_text("[model]\nfamily = 'mixtral'\n[train]\nmicro_batch = 1\nglobal_batch = 12")
    model = ("model.config.num_local_experts=8", "train.seq_len=64")
    with pytest.raises(ConfigError) as refused:
        resolve_config(load(tmp_path / "run.toml", [*model, *degrees]), world)
    (problem,) = refused.value.problems
    assert problem.key == key and "does not divide" in problem.reason and "use" in problem.hint


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"backend": {"layers": "nxd"}}, "backend.layers"),
        ({"parallel": {"cp": 2}}, "parallel.cp"),
        ({"finetune": {"method": "lora", "targets": ["experts.down_proj"]}}, "finetune.targets"),
    ],
)
def test_what_biases_and_sinks_exclude_is_one_problem(sections: dict[str, Any], key: str) -> None:
    of_gpt_oss = MoeShape(4, 1, 8, router="router", biases=True, limit=7.0)
    (problem,) = experts(config(1, **sections), of_gpt_oss)
    assert problem.key == key and problem.hint
