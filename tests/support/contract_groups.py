"""Cases of `tests.support.contract` for products of groups of rows, as the experts of a block have them."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import torch
from torch import Tensor

from nxtrain.backends.cuda import CudaKernels
from nxtrain.common.kernels import Kernels, RowGroups
from tests.support.contract import BOUNDS, COLUMNS, CONTIGUOUS, FORMS, TRANSPOSED, WHOLE, Operand, Update
from tests.support.contract_ranges import Values


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
    found: list[Tensor] = []

    def call(rows: Tensor, matrices: Tensor) -> None:
        found.append(kernels.grouped_matmul(rows, matrices, _groups(kernels, counts, rows.dtype)))

    def check(before: Values, after: Values) -> None:
        rows, matrices = before["rows"].double(), before["matrices"].double()
        parts = zip(rows.split(counts), matrices, strict=True)
        wanted = torch.cat([own @ matrix for own, matrix in parts])
        assert found[-1].dtype == before["rows"].dtype
        assert (found[-1].double() - wanted).norm() <= BOUNDS[found[-1].dtype] * rows.norm() * matrices.norm()

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
