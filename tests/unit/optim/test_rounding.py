"""Stochastic rounding: unbiased, exact where it must be, the same bits on every path, and other bits each step."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nxtrain.backends.cpu_kernels import CpuKernels
from nxtrain.backends.cuda import CudaKernels
from nxtrain.backends.rounding import step_hash
from nxtrain.backends.torch_kernels import PlainKernels
from nxtrain.common.dimensions import MoeShape
from nxtrain.common.distributed.c10d_collectives import C10dCollectives
from nxtrain.common.kernels import Kernels
from nxtrain.common.mesh import Mesh
from nxtrain.common.sharding import Layout, ParamTable
from nxtrain.optim.rounding import rounding_keys
from nxtrain.parallel.expert_parallel import ExpertParallel
from tests.support.adamw import rounded

KERNELS = {"CPU kernels": CpuKernels(), "CUDA kernels on CPU tensors": CudaKernels(), "plain kernels": PlainKernels()}
"""Kernels whose operations run here on CPU tensors; `tests/device` runs those of CUDA on a GPU."""

EVERY = pytest.mark.parametrize("kernels", KERNELS.values(), ids=KERNELS)
BF16 = torch.bfloat16


def of_bits(*patterns: int) -> Tensor:
    return torch.tensor(patterns, dtype=torch.int64).to(torch.int32).view(torch.float32)


def neighbours(x: Tensor) -> tuple[Tensor, Tensor]:
    """The bfloat16 numbers on both sides, towards zero and away from it, and their distance, all in float32."""
    inner = (x.view(torch.int32) & -0x10000).view(torch.float32)
    outer = ((x.view(torch.int32) & -0x10000) + 0x10000).view(torch.float32)
    return inner, outer


def test_the_mean_of_many_draws_is_the_number() -> None:
    values = torch.rand(64, generator=torch.Generator().manual_seed(1)) * 100
    inner, outer = neighbours(values)
    ulp = outer - inner
    draws = 200_000
    bound = 5 * 0.5 / draws**0.5
    means = rounded(values.expand(draws, 64)).double().mean(0)
    assert ((means - values) / ulp).abs().max() <= bound
    assert ((values.to(BF16).float() - values) / ulp).abs().mean() > 10 * bound, "rounding to nearest would pass"
    over_steps = torch.stack([rounded(values, step).double() for step in range(2000)]).mean(0)
    assert ((over_steps - values) / ulp).abs().max() <= 5 * 0.5 / 2000**0.5


def walk(narrow: Callable[[Tensor, int], Tensor]) -> Tensor:
    """A thousand steps of 1e-3 from 1, in 64 weights."""
    weights = torch.ones(64, dtype=BF16)
    for step in range(1000):
        weights = narrow(weights.float() + 1e-3, step)
    return weights.float()


def test_steps_far_below_half_an_ulp_add_up() -> None:
    assert abs(walk(rounded).mean().item() - 2) <= 4 * 0.0825 / 64**0.5
    assert torch.equal(walk(lambda x, _: x.to(BF16)), torch.ones(64))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_chance_of_rounding_away_from_zero_is_the_distance_from_the_number_nearer_to_it(sign: float) -> None:
    draws, chi_square, cells = 20_000, 0.0, 0
    for exponent in (-126, -60, -10, -1, 0, 1, 10, 126):
        for fraction in (1 << 8, 1 << 12, 1 << 14, 3 << 13, 1 << 15, 0xC000, 0xFF00):
            bits = (exponent + 127 << 23) + (0x55 << 16) + fraction
            x = sign * of_bits(bits)
            _, outer = neighbours(x)
            result = rounded(x.expand(100, draws // 100).contiguous()) == outer.to(BF16)
            chance = fraction / 65536
            chi_square += (result.sum().item() - draws * chance) ** 2 / (draws * chance * (1 - chance))
            cells += 1
    assert chi_square < cells + 4 * (2 * cells) ** 0.5


@EVERY
def test_infinities_nan_zeros_and_what_bf16_has_stay(kernels: Kernels) -> None:
    x = of_bits(0x7F800000, 0xFF800000, 0x00000000, 0x80000000)
    assert torch.equal(rounded(x, kernels=kernels).view(torch.int16), x.to(BF16).view(torch.int16))
    nan = of_bits(0x7F800001, 0x7F80FFFF, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF)
    for step in range(20):
        assert rounded(nan.repeat(50), step, kernels=kernels).isnan().all()
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(BF16)
    finite = every[every.isfinite()]
    for step in range(3):
        result = rounded(finite.float(), step, kernels=kernels)
        assert torch.equal(result.view(torch.int16), finite.view(torch.int16))


@EVERY
def test_subnormals_round_to_their_neighbours_and_the_largest_may_overflow(kernels: Kernels) -> None:
    small = of_bits(*range(1, 1 << 23, 4099))
    for x in (small, -small):
        result, (inner, outer) = rounded(x, kernels=kernels).float(), neighbours(x)
        assert ((result == inner) | (result == outer)).all()
    largest = of_bits(0x7F7FFFFF).repeat(1000)
    result = rounded(largest, kernels=kernels)
    assert set(result.tolist()) <= {torch.inf, torch.finfo(BF16).max}
    assert not rounded(of_bits(0x7F7F0000).repeat(1000), kernels=kernels).isinf().any()


@pytest.mark.parametrize("shape", [(7,), (64, 48), (33, 17), (5, 3, 7), (1, 1)])
@pytest.mark.parametrize("special", [False, True])
def test_every_path_rounds_to_the_same_bits(shape: tuple[int, ...], special: bool) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 1e3
    if special:
        x.view(-1)[0], x.view(-1)[-1] = torch.nan, -torch.inf
    for step in (1, 2, 500_000):
        first, *others = (rounded(x, step, kernels=kernels).view(torch.int16) for kernels in KERNELS.values())
        assert all(torch.equal(first, other) for other in others)


def test_bits_replay_and_differ_between_steps_seeds_names_kinds_rows_and_columns() -> None:
    x = torch.full((256, 256), 1 + 2**-8)  # half way
    assert torch.equal(rounded(x), rounded(x))
    up = (rounded(x) > 1).float()
    others = [rounded(x, 2), rounded(x, seed=1), rounded(x, name="v"), rounded(x, kind="exp_avg")]
    for other in [*((o > 1).float() for o in others), up.roll(1, 0), up.roll(1, 1), up.roll(2, 1), up.t()]:
        agreement = (up == other).float().mean().item()
        assert abs(agreement - 0.5) < 5 * 0.5 / 256


def test_nothing_is_drawn_from_the_global_generator() -> None:
    before = torch.random.get_rng_state()
    rounded(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_hash_of_a_step_leaves_the_step_as_it_is() -> None:
    for dtype in (torch.float32, torch.int32):
        step = torch.tensor(7, dtype=dtype)
        assert step_hash(step).equal(step_hash(torch.tensor(7.0)))
        assert step.item() == 7
        assert step._version == 0


MIXTURE, WIDTH = MoeShape(4, 2, 33), 64
"""Experts of an odd width, so that the columns of a pair would lie in two experts."""


def rounded_experts(kernels: Kernels, **degrees: int) -> dict[str, Tensor]:
    """Numbers half way between two, rounded by every rank of a layout and put together by global name."""
    results: dict[str, Tensor] = {}
    world = degrees.get("tp", 1) * degrees.get("dp", 1)
    for rank in range(world):
        mesh = Mesh.build(world, rank, **degrees)  # type: ignore[arg-type]
        specs = MIXTURE.specs(WIDTH, ExpertParallel(mesh.ep, C10dCollectives(1)).own(MIXTURE.num_experts))
        layout = Layout(ParamTable(specs), mesh)
        for name, spec in specs.items():
            rows = -(-spec.local_shape(mesh.tp)[0] // layout.axes_of(name).shard.size)
            x = torch.full((rows, spec.local_shape(mesh.tp)[1]), 1 + 2**-8)
            (key,) = rounding_keys(Layout(ParamTable({name: spec}), mesh), {name: x}, "param", 3, torch.clone).values()
            out = torch.empty(x.shape, dtype=BF16)
            kernels.stochastic_round(x.clone(), out, key, step_hash(torch.ones(())))
            for block in layout[name]:
                shape, name_of = spec.global_shape(block.segment), spec.global_name(name, block.segment)
                whole = results.setdefault(name_of, torch.full(shape, torch.nan))
                (row, column), (num_rows, num_columns) = block.offsets, block.sizes
                whole[row : row + num_rows, column : column + num_columns] = block.of(out).float()
    return results


@EVERY
@pytest.mark.parametrize(
    "degrees",
    [
        {"dp": 2, "ep": 2},
        {"dp": 4, "ep": 4, "shard": 4},
        {"dp": 4, "ep": 2, "shard": 4},
        {"tp": 2, "dp": 4, "ep": 2, "shard": 2},
        {"tp": 3, "dp": 3, "shard": 3},
        {"tp": 4},
    ],
    ids=str,
)
def test_the_bits_of_an_expert_do_not_depend_on_the_ranks_that_hold_it(
    kernels: Kernels, degrees: dict[str, int]
) -> None:
    result, alone = rounded_experts(kernels, **degrees), rounded_experts(PlainKernels())
    assert result.keys() == alone.keys()
    assert len(alone) == 3 * MIXTURE.num_experts
    assert [name for name, whole in alone.items() if not torch.equal(result[name], whole)] == []


def test_experts_have_bits_of_their_own() -> None:
    alone = [(whole > 1).float() for whole in rounded_experts(PlainKernels()).values()]
    for index, one in enumerate(alone):
        others = [other for other in alone[index + 1 :] if other.shape == one.shape]
        for other in [*others, one.roll(1, 0), one.roll(1, 1)]:
            agreement = (one == other).float().mean().item()
            assert abs(agreement - 0.5) < 5 * 0.5 / math.sqrt(one.numel())
