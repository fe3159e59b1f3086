"""Context parallelism in a configuration: what divides what, and what goes together."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.config.test_check import checked, only, problems


@pytest.mark.parametrize(
    ("overrides", "world", "key", "reason", "hint"),
    [
        (["train.seq_len=127"], 2, "train.seq_len", "cp=2 does not divide seq_len=127", "train.seq_len=126 or 128"),
        (
            ["parallel.cp_layout=zigzag", "train.seq_len=126"],
            2,
            "train.seq_len",
            "2 x cp=4, as cp_layout=zigzag asks, does not divide seq_len=126",
            "train.seq_len=124 or 128, or parallel.cp_layout=auto",
        ),
        (
            ["parallel.tp=2", "parallel.sequence_parallel=true", "train.seq_len=126"],
            4,
            "train.seq_len",
            "cp=2 or cp x tp=4, as sequence_parallel asks, does not divide seq_len=126",
            "train.seq_len=124 or 128",
        ),
        ([], 3, "parallel.cp", "tp=1 x cp=2 x pp=1 = 2 does not divide the world of 3 ranks", "multiple of 2 ranks"),
        (
            ["parallel.dp=2"],
            2,
            "parallel.dp",
            "tp=1 x cp=2 x pp=1 x dp=2 = 4 ranks, but the world has 2",
            "use dp=1",
        ),
        (
            ["parallel.shard=hybrid", "parallel.shard_size=3", "parallel.dp=2"],
            4,
            "parallel.shard_size",
            "3 does not divide dp x cp=4",
            "use one of 1, 2, 4",
        ),
        (
            ["parallel.cp_method=ring", "backend.name=xla"],
            2,
            "parallel.cp_method",
            "ring differs by rank, and backend.name=xla records one graph for all ranks",
            "use auto or gather",
        ),
        (["backend.layers=nxd"], 2, "backend.layers", "cp=2 divides sequences in nxtrain's own layers", "use auto"),
        (
            ["compile.torch_compile=true"],
            2,
            "compile.torch_compile",
            "cp_method=auto may use a ring, whose transfers between ranks cannot be part of a graph",
            "parallel.cp_method=gather",
        ),
    ],
)
def test_a_division_that_does_not_work_is_refused_with_the_way_out(
    tmp_path: Path, overrides: list[str], world: int, key: str, reason: str, hint: str
) -> None:
    given = ["parallel.cp=2", "train.global_batch=8", *overrides]
    result = next(problem for problem in problems(tmp_path, *given, world=world) if problem.key == key)
    assert reason in result.reason
    assert hint in (result.hint or "")


def test_sequence_parallelism_alone_asks_for_its_own_division(tmp_path: Path) -> None:
    problem = only(tmp_path, "parallel.tp=2", "parallel.sequence_parallel=true", "train.seq_len=127", world=2)
    assert problem.reason == "tp=2 does not divide seq_len=127, as sequence_parallel asks"
    assert problem.hint == "use train.seq_len=126 or 128, or parallel.sequence_parallel=false"


def test_ranks_of_one_sequence_count_once_for_the_batch(tmp_path: Path) -> None:
    config = checked(tmp_path, "parallel.cp=2", "parallel.tp=2", "train.global_batch=2", world=8).config
    assert config.parallel.ranks_per_replica == 4


@pytest.mark.parametrize(
    ("overrides", "reason", "hint"),
    [
        (["parallel.tp=2", "compile.torch_compile=true"], "overlaps the collectives of sequence_parallel", "tp=2"),
        (["parallel.tp=2", "parallel.sequence_parallel=true"], "blocks compiled by torch.compile", "use false"),
        (
            ["parallel.tp=2", "parallel.sequence_parallel=true", "compile.torch_compile=true", "backend.name=cpu"],
            "not backend.name=cpu",
            "backend.name=cuda",
        ),
    ],
)
def test_products_overlap_with_nothing_where_no_compiler_joins_them(
    tmp_path: Path, overrides: list[str], reason: str, hint: str
) -> None:
    result = only(tmp_path, "parallel.async_tp=true", *overrides, world=2)
    assert result.key == "parallel.async_tp" and reason in result.reason
    assert hint in (result.hint or "")
