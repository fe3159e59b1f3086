"""Router and dispatch of a mixture of experts, one by one: ties, empty experts, capacities and number types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from nxtrain.backends.cpu import CpuBackend
from nxtrain.backends.torch_kernels import FusedKernels
from nxtrain.common.dimensions import MoeShape
from nxtrain.common.family import BuildContext
from nxtrain.common.kernels import ANY_ROWS, Grouping, Kernels
from nxtrain.common.sharding import Init
from nxtrain.nn.balance import balance_loss
from nxtrain.nn.mixture import Router
from nxtrain.parallel.dispatch import capacity_of, dispatch, static_dispatch
from nxtrain.parallel.expert_products import ExpertMatrices
from nxtrain.parallel.native import NativeLayers
from nxtrain.parallel.slot_rows import block_rows, sorted_rows
from tests.support.contract_experts import GroupingKernels, drawn_indices, exact_mixture
from tests.support.models import alone, filled, random

KERNELS = FusedKernels()


def router(weight: Tensor, k: int, *, is_normalized: bool = True) -> Router:
    mixture = MoeShape(len(weight), k, 1, is_normalized=is_normalized)
    context = BuildContext(NativeLayers(alone()), CpuBackend().kernels, weight.dtype, seq_len=1)
    with torch.device("meta"):
        made = Router(weight.shape[1], mixture, init=Init(), context=context)
    return filled(made, alone().axis, {"": weight})


@pytest.mark.parametrize("num_experts", [2, 5, 16, 64])
def test_of_equally_probable_experts_the_lower_index_wins(num_experts: int) -> None:
    rng = Random(num_experts)
    rows = random(num_experts, 8, seed=num_experts)
    for expert in range(1, num_experts):
        if rng.random() < 0.6:
            rows[expert] = rows[rng.randrange(expert)]
    k = max(1, num_experts // 2)
    x = random(40, 1, 8, seed=1)
    _, indices, _ = router(rows, k)(x)
    probabilities = (x @ rows.t()).softmax(-1).flatten(0, 1)
    for own, result in zip(probabilities.tolist(), indices.flatten(0, 1).tolist(), strict=True):
        assert result == sorted(range(num_experts), key=lambda expert: (-own[expert], expert))[:k]


def test_a_router_computes_in_float32_from_weights_of_16_bits() -> None:
    weight, x = random(6, 32, dtype=torch.bfloat16), random(9, 2, 32, dtype=torch.bfloat16, seed=1)
    weights, indices, routing = router(weight, 2)(x)
    wide, wide_indices, wide_routing = router(weight.float(), 2)(x.float())
    assert weights.dtype == routing.dtype == torch.float32
    assert torch.equal(weights, wide)
    assert torch.equal(indices, wide_indices)
    assert torch.equal(routing, wide_routing)


@pytest.mark.parametrize("is_normalized", [True, False])
def test_the_statistics_are_sums_over_tokens(is_normalized: bool) -> None:
    weight, x = random(5, 8), random(7, 3, 8, seed=1)
    weights, indices, routing = router(weight, 2, is_normalized=is_normalized)(x)
    logits = (x @ weight.t()).flatten(0, 1).double()
    slots, probabilities, (squares, tokens, entropy, dropped) = routing[:5], routing[5:10], routing[10:]
    assert slots.tolist() == [(indices == expert).sum().item() for expert in range(5)]
    torch.testing.assert_close(probabilities.double(), logits.softmax(-1).sum(0), rtol=1e-6, atol=0)
    torch.testing.assert_close(squares.double(), logits.logsumexp(-1).square().sum(), rtol=1e-6, atol=0)
    entropies = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(entropy.double(), entropies.sum(), rtol=1e-6, atol=0)
    assert tokens.item() == 21
    assert dropped.item() == 0
    assert bool((weights.sum(-1) - 1).abs().max() < 1e-6) is is_normalized
    balance, z_loss = balance_loss(routing)
    torch.testing.assert_close(balance, 5 * (slots / 21 * probabilities / 21).sum())
    torch.testing.assert_close(z_loss, squares / 21)


Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def operands(indices: Tensor, num_experts: int, hidden: int = 12, width: int = 10) -> Operands:
    num_tokens, k = indices.shape
    return (
        random(num_tokens, hidden, seed=1).requires_grad_(),
        random(num_tokens, k, seed=2).softmax(-1).requires_grad_(),
        indices,
        random(num_experts * 2 * width, hidden, seed=3).requires_grad_(),
        random(hidden, num_experts * width, seed=4).requires_grad_(),
    )


Way = Callable[..., Tensor]


def computed(given: Operands, call: Way) -> list[Tensor]:
    """Result and gradients."""
    fresh = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in given]
    out = call(fresh)
    out.backward(random(*out.shape, seed=5).to(out.dtype))
    grads = [x.grad for x in fresh if x.requires_grad]
    assert all(grad is not None for grad in grads), "an expert without tokens has a gradient of zeros"
    return [out.detach(), *(grad for grad in grads if grad is not None)]


ROUTINGS = {
    "one token": torch.tensor([[2, 0]]),
    "all tokens to one expert": torch.full((9, 1), 1),
    "all experts for each token": torch.arange(4).repeat(6, 1),
    "an expert without tokens": torch.tensor([[0, 3], [3, 0], [1, 3]]),
    **{f"drawn {seed}": drawn_indices(Random(seed), 3 + 7 * seed, 1 + seed % 4, 4) for seed in range(6)},
}


def eager(given: Operands, capacity: int | None = None, kernels: Kernels = KERNELS) -> Tensor:
    return dispatch(*given[:3], ExpertMatrices(*given[3:], 4), 4, kernels, capacity)


def static(given: Operands, capacity: int | None = None) -> Tensor:
    return static_dispatch(*given[:3], ExpertMatrices(*given[3:], 4), 4, capacity)


def exact(given: Operands) -> Tensor:
    return exact_mixture(*given, 4)


def close(actual: list[Tensor], want: list[Tensor]) -> None:
    for mine, theirs in zip(actual, want, strict=True):
        bound = 2e-6 * max(1.0, theirs.abs().max().item())
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=0, atol=bound)


@pytest.mark.parametrize("way", [eager, static])
@pytest.mark.parametrize("name", ROUTINGS)
def test_each_token_gets_the_weighted_sum_of_its_experts(name: str, way: Way) -> None:
    given = operands(ROUTINGS[name], 4)
    x, weights, indices, gate_up, down = (x.detach() for x in given)
    doubled = (x.double(), weights.double(), indices, gate_up.double(), down.double())
    want = computed(doubled, exact)
    close(computed(given, way), want)


@pytest.mark.parametrize("way", [eager, static])
@pytest.mark.parametrize("name", ROUTINGS)
def test_a_capacity_that_leaves_nothing_out_changes_no_bit(name: str, way: Way) -> None:
    given = operands(ROUTINGS[name], 4)
    capacity = int(torch.bincount(ROUTINGS[name].flatten()).max())
    actual = computed(given, lambda own: way(own, capacity))
    want = computed(given, way)
    if way is eager:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(actual, want, strict=True))
    close(actual, want)


@pytest.mark.parametrize("way", [eager, static])
@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_an_expert_leaves_out_the_last_tokens_beyond_its_capacity(name: str, capacity: int, way: Way) -> None:
    indices = ROUTINGS[name]
    given = operands(indices, 4)
    taken = [0] * 4
    kept = torch.zeros(indices.shape)
    for token, experts in enumerate(indices.tolist()):
        for slot, expert in enumerate(experts):
            kept[token, slot] = float(taken[expert] < capacity)
            taken[expert] += 1
    actual = computed(given, lambda own: way(own, capacity))
    want = computed(given, lambda own: eager((own[0], own[1] * kept, *own[2:])))
    close(actual, want)
    _, counts = sorted_rows(indices, 4, capacity)
    assert counts.tolist() == [min(capacity, number) for number in taken]


@pytest.mark.parametrize("num_experts", [1, 2, 5, 8])
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("num_tokens", [1, 3, 8, 17])
def test_blocks_hold_every_slot_once_whatever_the_routing(num_experts: int, k: int, num_tokens: int) -> None:
    k = min(k, num_experts)
    shapes = set()
    for seed in range(12):
        indices = drawn_indices(Random(seed), num_tokens, k, num_experts)
        rows, owner, num_blocks = block_rows(indices, num_experts)
        assert owner is not None
        shapes.add((rows.slots.shape, owner.shape, num_blocks))
        held = rows.slots[rows.slots < indices.numel()]
        assert sorted(held.tolist()) == list(range(indices.numel()))
        assert torch.equal(rows.slots[rows.of_slots], torch.arange(indices.numel()))
        height = len(rows.slots) // num_blocks
        assert torch.equal(owner[rows.of_slots // height], indices.flatten())
    assert len(shapes) == 1


@pytest.mark.parametrize("capacity", [None, 2])
@pytest.mark.parametrize("name", ROUTINGS)
def test_products_that_want_multiples_of_rows_get_them_and_no_other_result(name: str, capacity: int | None) -> None:
    class Aligned(FusedKernels):
        def grouping(self, dtype: torch.dtype, sizes: Sequence[int]) -> Grouping:
            return Grouping(multiple=4)

    indices = ROUTINGS[name]
    rows, heights = sorted_rows(indices, 4, capacity, Grouping(multiple=4))
    counts = torch.bincount(indices.flatten(), minlength=4).clamp(max=capacity or indices.numel())
    assert heights.tolist() == [-(-count // 4) * 4 for count in counts.tolist()]
    held = rows.slots[rows.slots < indices.numel()]
    assert len(rows.slots) == heights.sum()
    assert len(held) == counts.sum()
    assert torch.equal(rows.of_slots[held], (rows.slots < indices.numel()).nonzero().squeeze(1))
    given = operands(indices, 4)
    close(
        computed(given, lambda own: eager(own, capacity, Aligned())),
        computed(given, lambda own: eager(own, capacity)),
    )


def in_bf16(given: Operands) -> Operands:
    x, weights, indices, gate_up, down = given
    return x.bfloat16(), weights, indices, gate_up.bfloat16(), down.bfloat16()


@pytest.mark.parametrize("capacity", [None, 2])
@pytest.mark.parametrize("name", ROUTINGS)
def test_grouped_products_of_a_gpu_equal_the_products_of_each_expert(name: str, capacity: int | None) -> None:
    given = in_bf16(operands(ROUTINGS[name], 4, hidden=16, width=8))
    actual = computed(given, lambda own: eager(own, capacity, GroupingKernels()))
    want = computed(given, lambda own: eager(own, capacity, KERNELS))
    for mine, theirs in zip(actual, want, strict=True):
        assert mine.dtype == theirs.dtype
        assert (mine.double() - theirs.double()).norm() <= 3e-2 * theirs.double().norm()


def test_with_grouped_products_the_host_reads_nothing_of_the_routing() -> None:
    given = in_bf16(operands(ROUTINGS["drawn 1"], 4, hidden=16, width=8))
    x, weights, indices, gate_up, down = (tensor.detach() for tensor in given)
    for capacity in (None, 2):
        with FakeTensorMode() as mode:
            own = (mode.from_tensor(x).requires_grad_(), mode.from_tensor(weights), mode.from_tensor(indices))
            fake = (*own, mode.from_tensor(gate_up), mode.from_tensor(down))
            eager(fake, capacity, GroupingKernels()).sum().backward()
            assert fake[0].grad is not None
            with pytest.raises(DataDependentOutputException):
                eager(fake, capacity)


@pytest.mark.parametrize("sizes", [(16, 12), (20, 8)])
def test_sizes_that_are_no_multiples_of_16_bytes_have_no_grouped_products(sizes: tuple[int, int]) -> None:
    kernels = GroupingKernels()
    assert kernels.grouping(torch.bfloat16, (16, 8)) == Grouping(multiple=8, counted=False)
    assert kernels.grouping(torch.bfloat16, sizes) == kernels.grouping(torch.float32, (16, 8)) == ANY_ROWS


def test_a_capacity_is_a_multiple_of_an_even_load() -> None:
    assert capacity_of(num_slots=64, num_experts=8, factor=1.0) == 8
    assert capacity_of(num_slots=65, num_experts=8, factor=1.0) == 9
    assert capacity_of(num_slots=64, num_experts=8, factor=1.25) == 10
    assert capacity_of(num_slots=3, num_experts=8, factor=0.5) == 1
