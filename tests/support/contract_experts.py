"""Cases of `tests.support.contract` for experts: products of groups of rows, dispatch, and the losses of routers."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from nxtrain.common.distributed.collectives import RowCounts
from nxtrain.common.kernels import Grouping, RowGroups
from nxtrain.nn.balance import _WithGradientOf
from nxtrain.parallel.blockwise_experts import by_kernel
from nxtrain.parallel.expert_products import BlockProducts, ExpertMatrices, ExpertProducts, GroupedProduct
from nxtrain.parallel.regions import _AllToAll
from nxtrain.parallel.slot_rows import SlotRows, _Collect, _Spread, block_rows, sorted_rows
from tests.support.contract import WHOLE, Operand, Shape, Work, drawn_kernels

if TYPE_CHECKING:
    from tests.support.contract_functions import Ranks
from dataclasses import replace

from nxtrain.backends.cuda import CudaKernels
from nxtrain.common.kernels import Kernels
from tests.support.contract import BOUNDS, COLUMNS, CONTIGUOUS, FORMS, TRANSPOSED, Update
from tests.support.contract_ranges import Values
from tests.support.nki_blockwise import STAND_INS


class GroupingKernels(CudaKernels):
    """Kernels of a GPU that multiplies groups in one kernel; on a CPU, torch's product group by group."""

    def _multiplies_groups(self) -> bool:
        return True


def _groups(kernels: Kernels, counts: list[int], dtype: torch.dtype) -> RowGroups:
    """Groups of some rows, which only the device knows where a kernel for groups takes the type."""
    groups = RowGroups.of(torch.tensor(counts))
    is_counted = not isinstance(kernels, CudaKernels) or dtype != torch.bfloat16
    return groups if is_counted else replace(groups, counts=None)


def grouped_matmul(kernels: Kernels, rng: Random) -> Update:
    """Products of groups of rows, of which some may be empty, each with its matrix."""
    counts, k, n = [rng.choice((0, 8, 16)) for _ in range(rng.randint(1, 4))], rng.choice((8, 24)), rng.choice((8, 16))
    forms = CONTIGUOUS if isinstance(kernels, CudaKernels) else FORMS
    results: list[Tensor] = []

    def call(rows: Tensor, matrices: Tensor) -> None:
        results.append(kernels.grouped_matmul(rows, matrices, _groups(kernels, counts, rows.dtype)))

    def check(before: Values, after: Values) -> None:
        rows, matrices = before["rows"].double(), before["matrices"].double()
        parts = zip(rows.split(counts), matrices, strict=True)
        wanted = torch.cat([own @ matrix for own, matrix in parts])
        assert results[-1].dtype == before["rows"].dtype
        assert (results[-1].double() - wanted).norm() <= BOUNDS[results[-1].dtype] * rows.norm() * matrices.norm()

    operands = {"rows": Operand((sum(counts), k), forms=forms), "matrices": Operand((len(counts), k, n), forms=forms)}
    return Update(f"grouped_matmul of {type(kernels).__name__} on {counts} rows, {(k, n)}", operands, call, check)


def grouped_gradient(kernels: Kernels, rng: Random) -> Update:
    """Products of the rows of each group; what was in the result before does not matter."""
    counts, k, n = [rng.choice((0, 8, 16)) for _ in range(rng.randint(1, 4))], rng.choice((8, 24)), rng.choice((8, 16))
    forms = CONTIGUOUS if isinstance(kernels, CudaKernels) else FORMS

    def call(left: Tensor, right: Tensor, out: Tensor) -> None:
        kernels.grouped_gradient(left, right, _groups(kernels, counts, left.dtype), out)

    def check(before: Values, after: Values) -> None:
        left, right = before["left"].double(), before["right"].double()
        parts = zip(left.split(counts), right.split(counts), strict=True)
        wanted = torch.stack([own.t() @ others for own, others in parts])
        bound = BOUNDS[after["out"].dtype] * left.norm() * right.norm()
        assert (after["out"].double() - wanted).norm() <= bound

    operands = {
        "left": Operand((sum(counts), k), forms=forms),
        "right": Operand((sum(counts), n), forms=forms),
        "out": Operand((len(counts), k, n), forms=(WHOLE, COLUMNS, TRANSPOSED), written=True),
    }
    return Update(f"grouped_gradient of {type(kernels).__name__} on {counts} rows, {(k, n)}", operands, call, check)


def drawn_indices(rng: Random, num_tokens: int, k: int, num_experts: int) -> Tensor:
    """(T, k) experts of each token, each once; at times all tokens have the same."""
    same = rng.sample(range(num_experts), k)
    alike = rng.random() < 0.2
    return torch.tensor([same if alike else rng.sample(range(num_experts), k) for _ in range(num_tokens)])


def exact_mixture(x: Tensor, weights: Tensor, indices: Tensor, gate_up: Tensor, down: Tensor, num: int) -> Tensor:
    """Weighted sum over the experts of each token: (T, D) to (T, D)."""
    out = []
    ups, downs = gate_up.chunk(num), down.chunk(num, dim=1)
    for row, own, chosen in zip(x, weights, indices.tolist(), strict=True):
        total = torch.zeros_like(row)
        for weight, expert in zip(own, chosen, strict=True):
            gate, values = F.linear(row, ups[expert]).chunk(2)
            total = total + weight * F.linear(F.silu(gate) * values, downs[expert])
        out.append(total)
    return torch.stack(out)


def _drawn_rows(rng: Random) -> tuple[SlotRows, int]:
    """Rows of some tokens in either form, of which a capacity may leave some out, and the number of tokens."""
    num_tokens, k, num = rng.randint(1, 6), rng.randint(1, 3), rng.randint(3, 5)
    indices, capacity = drawn_indices(rng, num_tokens, k, num), rng.choice((None, 1, 2))
    if rng.random() < 0.5:
        return block_rows(indices, num, capacity)[0], num_tokens
    grouping = Grouping(rng.choice((1, 1, 3)), counted=rng.random() < 0.5)
    return sorted_rows(indices, num, capacity, grouping)[0], num_tokens


def _matrix(rows: SlotRows, num_tokens: int) -> Tensor:
    """(N, T) matrix of which each row has a one at its token."""
    tokens = torch.arange(num_tokens)
    return (rows.slots.unsqueeze(1) // rows.k == tokens).double()


def spread(ranks: Ranks, rng: Random) -> Work:
    """Rows of the slots of each token."""
    rows, num_tokens = _drawn_rows(rng)

    def call(x: Tensor, slots: Tensor, of_slots: Tensor) -> Tensor:
        return _Spread.apply(x, slots, of_slots, rows.k, rows.is_full, rows.keeps_all)  # type: ignore[no-any-return]

    operands = {
        "x": Operand((num_tokens, 4)),
        "slots": integers(rows.slots),
        "of_slots": integers(rows.of_slots),
    }
    matrix = _matrix(rows, num_tokens)
    label = f"_Spread of {num_tokens} tokens, k {rows.k}, {len(rows.slots)} rows"
    return Work(label, operands, call, lambda x, *_: matrix @ x, in_float64=True)


def collect(ranks: Ranks, rng: Random) -> Work:
    """Sums over the slots of each token."""
    rows, num_tokens = _drawn_rows(rng)

    def call(x: Tensor, slots: Tensor, of_slots: Tensor) -> Tensor:
        return _Collect.apply(x, slots, of_slots, rows.k, rows.is_full, rows.keeps_all)  # type: ignore[no-any-return]

    operands = {
        "x": Operand((len(rows.slots), 4)),
        "slots": integers(rows.slots),
        "of_slots": integers(rows.of_slots),
    }
    matrix = _matrix(rows, num_tokens)
    label = f"_Collect of {num_tokens} tokens, k {rows.k}, {len(rows.slots)} rows"
    return Work(label, operands, call, lambda x, *_: matrix.t() @ x, in_float64=True)


def block_products(ranks: Ranks, rng: Random) -> Work:
    """Products of blocks of which several may be of one expert, and of some experts none."""
    num, height, width, hidden = rng.randint(1, 4), rng.choice((1, 3)), rng.choice((1, 3)), 4
    owner = torch.tensor(sorted(rng.choices(range(num), k=rng.randint(1, 6))))
    is_even = rng.random() < 0.3
    if is_even:
        owner = torch.arange(num)
    of_rows = owner.repeat_interleave(height).unsqueeze(1)

    def call(x: Tensor, scale: Tensor, gate_up: Tensor, down: Tensor, owners: Tensor) -> Tensor:
        of_blocks = None if is_even else owners
        return BlockProducts.apply(x, scale, gate_up, down, num, of_blocks)  # type: ignore[no-any-return]

    def exact(x: Tensor, scale: Tensor, gate_up: Tensor, down: Tensor, _: Tensor) -> Tensor:
        flat = exact_mixture(x.flatten(0, 1), scale.flatten().unsqueeze(1), of_rows, gate_up, down, num)
        return flat.view(x.shape)

    operands = {
        "x": Operand((len(owner), height, hidden)),
        "scale": Operand((len(owner), height), dtype=torch.float32),
        "gate_up": Operand((num * 2 * width, hidden)),
        "down": Operand((hidden, num * width)),
        "owners": integers(owner),
    }
    return Work(f"BlockProducts of {owner.tolist()}, {height} rows each", operands, call, exact)


def blockwise(ranks: Ranks, rng: Random) -> Work:
    """Experts by a kernel of all of them, some of which may have no row."""
    num, k, tokens = rng.choice((2, 3)), rng.choice((1, 2)), rng.choice((1, 5))
    width, hidden = 64, 512
    indices = drawn_indices(rng, tokens, k, num)

    def call(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return by_kernel(x, weights, indices, ExpertMatrices(gate_up, down, num), indices.numel(), STAND_INS)

    def exact(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return exact_mixture(x, weights, indices, gate_up, down, num)

    def small(generator: torch.Generator, shape: Shape) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) * 0.05

    operands = {
        "x": Operand((tokens, hidden)),
        "weights": Operand((tokens, k), dtype=torch.float32),
        "gate_up": Operand((num * 2 * width, hidden), small),
        "down": Operand((hidden, num * width), small),
    }
    return Work(f"_Blockwise of {indices.tolist()}", operands, call, exact)


def expert_products(ranks: Ranks, rng: Random) -> Work:
    """Products of experts of which some have no row."""
    counts = [rng.choice((0, 1, 2, 5)) for _ in range(rng.randint(1, 4))]
    counts[rng.randrange(len(counts))] += 1
    num, rows, width, hidden = len(counts), sum(counts), rng.choice((1, 3)), 4
    kernels, groups = drawn_kernels(rng), RowGroups.of(torch.tensor(counts))
    experts = torch.tensor([expert for expert, count in enumerate(counts) for _ in range(count)]).unsqueeze(1)

    def call(x: Tensor, scale: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return ExpertProducts.apply(x, scale, gate_up, down, groups, kernels)  # type: ignore[no-any-return]

    def exact(x: Tensor, scale: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return exact_mixture(x, scale.unsqueeze(1), experts, gate_up, down, num)

    operands = {
        "x": Operand((rows, hidden)),
        "scale": Operand((rows,), dtype=torch.float32),
        "gate_up": Operand((num * 2 * width, hidden)),
        "down": Operand((hidden, num * width)),
    }
    return Work(f"ExpertProducts of {counts}, {type(kernels).__name__}", operands, call, exact)


def grouped_product(ranks: Ranks, rng: Random) -> Work:
    """Products of the rows of each expert with one matrix, of experts of which some have no row."""
    counts = [rng.choice((0, 1, 2, 5)) for _ in range(rng.randint(1, 4))]
    counts[rng.randrange(len(counts))] += 1
    rows, inputs, outputs = sum(counts), rng.choice((1, 3)), rng.choice((1, 4))
    kernels, groups = drawn_kernels(rng), RowGroups.of(torch.tensor(counts))

    def call(x: Tensor, matrices: Tensor) -> Tensor:
        return GroupedProduct.apply(x, matrices, groups, kernels)  # type: ignore[no-any-return]

    def exact(x: Tensor, matrices: Tensor) -> Tensor:
        parts = zip(x.split(counts), matrices, strict=True)
        return torch.cat([F.linear(part, matrix) for part, matrix in parts])

    operands = {"x": Operand((rows, inputs)), "matrices": Operand((len(counts), outputs, inputs))}
    return Work(f"GroupedProduct of {counts}, {type(kernels).__name__}", operands, call, exact)


def all_to_all(ranks: Ranks, rng: Random) -> Work:
    """Blocks for every rank, of which each rank gets its own from all."""
    size, me = ranks.axis.size, ranks.axis.rank
    shape = ranks.draw_shape(rng, rng.choice((1, 3)))
    item = (shape[0] // size,) * size
    rows = rng.choice((None, RowCounts(item, item)))

    def exact(x: Tensor) -> Tensor:
        blocks = x.chunk(size)
        others = sum((block - block.detach() for block in blocks), torch.zeros_like(blocks[me]))
        # The rank at this position gets a block from each rank. Its gradient goes back to that rank's own blocks.
        received = [blocks[me].detach() + (others if source == me else 0.0) for source in range(size)]
        return torch.cat(received)

    label = f"_AllToAll on {shape} over {size}, {'even' if rows is None else 'counted'}"
    return Work(label, {"x": Operand(shape)}, lambda x: _AllToAll.apply(x, ranks.comm, ranks.axis, rows), exact)


def with_gradient_of(ranks: Ranks, rng: Random) -> Work:
    """A loss with the gradient of another one."""

    def exact(loss: Tensor, other: Tensor) -> Tensor:
        return loss + other - other.detach()

    return Work("_WithGradientOf", {"loss": Operand(()), "other": Operand(())}, _WithGradientOf.apply, exact)


def integers(indices: Tensor) -> Operand:
    """Operand of given integers."""

    def values(_: torch.Generator, shape: Shape) -> Tensor:
        return indices.clone()

    return Operand(tuple(indices.shape), values, forms=(WHOLE,), has_gradient=False)
