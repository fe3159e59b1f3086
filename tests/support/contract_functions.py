"""Cases of `tests.support.contract` for every `torch.autograd.Function` of the library.

Those that communicate are played by ranks that all have the same tensors. So a sum over two ranks is twice what one
has, and formulas stay short. `Echo` plays both in one process; on a process group the same cases hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nxtrain.backends.cpu_attention import _BlockedAttention, _WideFlashAttention, wide_flash_attention
from nxtrain.backends.nf4 import whole_packing
from nxtrain.backends.ranged_attention import RangedAttention, SinkAttention
from nxtrain.backends.torch_kernels import FusedKernels, SavingProduct, _RMSNorm, _Rotate, _SwiGLU
from nxtrain.common.distributed.collectives import Collectives, Done, Op, Pending, RowCounts
from nxtrain.common.kernels import Kernels
from nxtrain.common.mesh import Axis
from nxtrain.common.vocab import IGNORE_INDEX, VocabColumns
from nxtrain.config.finetune import BLOCK
from nxtrain.nn.balance import _WithGradientOf
from nxtrain.nn.quantized import _RestoredProduct
from nxtrain.parallel.blockwise_experts import _Blockwise
from nxtrain.parallel.chunks import _InChunks, _Saved, in_chunks
from nxtrain.parallel.expert_products import BlockProducts, ExpertProducts, GroupedProduct
from nxtrain.parallel.float8 import _Float8Product
from nxtrain.parallel.linear import Product, _Biased, _ColumnProduct, _SplitProduct
from nxtrain.parallel.loss import _chunk_of, _TokenCrossEntropy, _VocabCrossEntropy
from nxtrain.parallel.pipeline import _EndChunk, _ReceivedGrads
from nxtrain.parallel.regions import TensorParallel, _AllToAll
from nxtrain.parallel.slot_rows import _Collect, _Spread
from nxtrain.parallel.weight_grads import _Gradient
from nxtrain.tools.bench.pipeline_rank import _Occupied
from nxtrain.tools.trace.step_trace import _Backward
from tests.support.contract import WHOLE, Operand, Shape, Work, drawn_kernels
from tests.support.contract_experts import (
    all_to_all,
    block_products,
    blockwise,
    collect,
    expert_products,
    grouped_product,
    spread,
    with_gradient_of,
)
from tests.support.contract_kernels import (
    EPS,
    exact_attention,
    exact_rms_norm,
    exact_rotate,
    exact_swiglu,
    rotated_operands,
    swiglu_shape,
)
from tests.support.contract_ranges import CONTEXT_CASES, LENGTHS, ranged, with_sinks
from tests.support.contract_regions import REGION_CASES
from tests.support.float8 import float8_product


class Echo(Collectives):
    """Ranks that all have the same: a collective needs no other rank. The one that may work in place does.

    Buckets and transfers belong to steps and pipelines. No autograd function calls them, and one that did would fail.
    """

    def start_all_reduce(self, x: Tensor, axis: Axis, op: Op = "sum") -> Pending[Tensor]:
        return Done(x.mul_(axis.size) if op == "sum" and axis.size > 1 else x)

    def start_all_gather(self, x: Tensor, axis: Axis) -> Pending[Tensor]:
        return Done(torch.cat([x] * axis.size) if axis.size > 1 else x)

    def start_all_to_all(self, x: Tensor, axis: Axis, rows: RowCounts | None = None) -> Pending[Tensor]:
        if axis.size == 1:
            return Done(x)
        blocks = x.chunk(axis.size) if rows is None else x.split(rows.sent)
        return Done(torch.cat([blocks[axis.rank]] * axis.size))

    def start_reduce_scatter(self, x: Tensor, axis: Axis, scale: float = 1.0) -> Pending[Tensor]:
        return Done(x.chunk(axis.size)[axis.rank] * (axis.size * scale) if axis.size > 1 else x)

    def start_all_reduce_bucket(
        self, tensors: Sequence[Tensor], axis: Axis, dtype: torch.dtype, scale: float = 1.0
    ) -> Pending[list[Tensor]]:
        raise NotImplementedError

    def start_send(self, x: Tensor, axis: Axis, to: int) -> Pending[None]:
        raise NotImplementedError

    def start_receive(self, like: Tensor, axis: Axis, source: int) -> Pending[Tensor]:
        raise NotImplementedError

    def exchange(self, x: Tensor, axis: Axis, peer: int) -> Tensor:
        raise NotImplementedError

    def start_shift(self, x: Tensor, axis: Axis, hops: int = 1) -> Pending[Tensor]:
        return Done(x)

    def barrier(self) -> None:
        """Nothing: there is nobody else."""


@dataclass(frozen=True)
class Ranks:
    """A rank among some that all have the same tensors."""

    comm: Collectives
    axis: Axis

    def parallel(self, dtype: torch.dtype, sequence_parallel: bool, kernels: Kernels | None = None) -> TensorParallel:
        """Context that layers are built with."""
        sequence_parallel = sequence_parallel and self.axis.size > 1
        return TensorParallel(self.axis, self.comm, kernels or FusedKernels(), dtype, sequence_parallel)

    def gathered(self, x: Tensor) -> Tensor:
        """Parts of all ranks, one after the other; the gradient is that of this rank's part."""
        return torch.cat([x if rank == self.axis.rank else x.detach() for rank in range(self.axis.size)])

    def heard(self, x: Tensor) -> Tensor:
        """The same values, whose gradient is summed over the ranks."""
        return x + (self.axis.size - 1) * (x - x.detach())

    def summed(self, x: Tensor) -> Tensor:
        """The sum over the ranks, whose gradient is that of one."""
        return x + (self.axis.size - 1) * x.detach()

    def scattered(self, x: Tensor) -> Tensor:
        """This rank's part of the sum; each part gets the gradient of its rank, and those are equal."""
        parts = x.chunk(self.axis.size)
        total = sum(parts[1:], parts[0])
        return total + (self.axis.size * parts[self.axis.rank] - total).detach()

    def draw_shape(self, rng: Random, width: int) -> Shape:
        """(S, B, width) with a sequence that divides over the ranks."""
        return self.axis.size * rng.choice((1, 2, 3)), rng.choice((1, 2)), width


def swiglu(ranks: Ranks, rng: Random) -> Work:
    """A gated unit."""
    shape = swiglu_shape(rng)
    return Work(f"_SwiGLU on {shape}", {"x": Operand(shape)}, _SwiGLU.apply, exact_swiglu, in_float64=True)


def rotate(ranks: Ranks, rng: Random) -> Work:
    """A rotation of pairs."""
    operands = rotated_operands(rng)
    return Work(f"_Rotate on {operands['x'].shape}", operands, _Rotate.apply, exact_rotate)


def norm(ranks: Ranks, rng: Random) -> Work:
    """Normalization of rows."""
    shape = ranks.draw_shape(rng, rng.choice((4, 7)))
    operands = {"x": Operand(shape), "weight": Operand(shape[-1:])}
    return Work(f"_RMSNorm on {shape}", operands, lambda x, weight: _RMSNorm.apply(x, weight, EPS), exact_rms_norm)


def attention(ranks: Ranks, rng: Random) -> Work:
    """Attention block by block."""
    return _attention(rng, "_BlockedAttention", _BlockedAttention.apply)


def wide_flash(ranks: Ranks, rng: Random) -> Work:
    """Attention by torch's flash kernel in float32."""
    return _attention(rng, "_WideFlashAttention", wide_flash_attention)


def _attention(rng: Random, name: str, attend: Callable[..., Tensor]) -> Work:
    length, batch, width = rng.choice(LENGTHS), rng.choice((1, 2)), rng.choice((2, 4))
    kv_heads, repeats = rng.choice((1, 2)), rng.choice((1, 1, 2))
    q, kv = (length, batch, kv_heads * repeats, width), (length, batch, kv_heads, width)
    operands = {"q": Operand(q), "k": Operand(kv), "v": Operand(kv)}
    return Work(f"{name} on {q} and {kv}", operands, attend, exact_attention)


def product(ranks: Ranks, rng: Random) -> Work:
    """A product with a weight."""
    shape = ranks.draw_shape(rng, rng.choice((1, 4)))
    operands = {"x": Operand(shape), "weight": Operand((rng.choice((1, 3)), shape[-1]))}
    kernels = drawn_kernels(rng)
    label = f"SavingProduct on {shape}, {type(kernels).__name__}"
    return Work(label, operands, lambda x, w: SavingProduct.apply(x, w, kernels), F.linear, in_float64=True)


def biased(ranks: Ranks, rng: Random) -> Work:
    """A product and the bias of its columns."""
    shape = ranks.draw_shape(rng, rng.choice((1, 4)))
    operands = {"x": Operand(shape), "bias": Operand(shape[-1:])}
    return Work(f"_Biased on {shape}", operands, _Biased.apply, torch.add, in_float64=True)


def restored_product(ranks: Ranks, rng: Random) -> Work:
    """A product with a weight in NF4, which gets no gradient; its values are those that NF4 has exactly."""
    shape, rows = ranks.draw_shape(rng, BLOCK), rng.choice((1, 3))
    weight = torch.tensor(rng.choices((-1.0, 0.0, 1.0), k=rows * BLOCK)).view(rows, BLOCK)

    def call(x: Tensor) -> Tensor:
        packing = whole_packing((rows, BLOCK), x.dtype)
        out: Tensor = _RestoredProduct.apply(x, packing.pack([weight]), packing, kernels)
        return out

    operands, kernels = {"x": Operand(shape)}, drawn_kernels(rng)
    label = f"_RestoredProduct on {shape}, {type(kernels).__name__}"
    return Work(label, operands, call, lambda x: F.linear(x, weight.to(x.dtype)))


def column_product(ranks: Ranks, rng: Random) -> Work:
    """A product of what all ranks need whole."""
    tp = ranks.parallel(torch.float32, rng.random() < 0.5, drawn_kernels(rng))
    shape = ranks.draw_shape(rng, 4)

    def exact(x: Tensor, weight: Tensor) -> Tensor:
        x = ranks.heard(x)
        return F.linear(ranks.gathered(x) if tp.sequence_parallel else x, weight)

    operands = {"x": Operand(shape), "weight": Operand((rng.choice((1, 3)), 4))}
    label = f"_ColumnProduct on {shape}, {tp}"
    alone = tp.axis.size == 1
    return Work(label, operands, lambda x, w: _ColumnProduct.apply(x, w, tp), exact, in_float64=alone)


def chunks(ranks: Ranks, rng: Random) -> Work:
    """A unit of two inputs, chunk by chunk, with a part of its sum over the ranks."""
    tp = ranks.parallel(torch.float32, rng.random() < 0.5, drawn_kernels(rng))
    shape, num_chunks, width = ranks.draw_shape(rng, 4), rng.choice((1, 2, 3)), rng.choice((1, 3))
    of_rows = shape[0] * (ranks.axis.size if tp.sequence_parallel else 1)

    def unit(x: Tensor, other: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight) + other

    def call(x: Tensor, other: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        def products(part: Tensor, part_of_other: Tensor) -> tuple[Tensor, ...]:
            return unit(part, part_of_other, weight), part_of_other.square()

        out, square = in_chunks(products, x, [other], [weight, bias], tp, num_chunks)
        return out + square + bias

    def exact(x: Tensor, other: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        x = ranks.heard(x)
        return unit(ranks.gathered(x) if tp.sequence_parallel else x, other, weight) + other.square() + bias

    operands = {
        "x": Operand(shape),
        "other": Operand((of_rows, shape[1], width)),
        "weight": Operand((width, 4)),
        "bias": Operand((width,)),
    }
    return Work(f"_InChunks on {shape}, {num_chunks} chunks, {tp}", operands, call, exact)


def split_product(ranks: Ranks, rng: Random) -> Work:
    """A product whose weight gets its gradient later."""
    tp = ranks.parallel(torch.float32, rng.random() < 0.5, drawn_kernels(rng))
    enters = rng.random() < 0.7
    shape = ranks.draw_shape(rng, 4)
    postponed: list[Product] = []

    def call(x: Tensor, weight: Tensor) -> Tensor:
        return _SplitProduct.apply(x, weight.detach(), tp, enters, postponed.append)  # type: ignore[no-any-return]

    def exact(x: Tensor, weight: Tensor) -> Tensor:
        if enters:
            x = ranks.heard(x)
            x = ranks.gathered(x) if tp.sequence_parallel else x
        return F.linear(x, weight)

    operands = {"x": Operand(shape, always=True), "weight": Operand((rng.choice((1, 3)), 4))}
    label = f"_SplitProduct on {shape}, entering {enters}, {tp}"
    return Work(label, operands, call, exact, later=lambda: {"weight": postponed.pop()()})


def gradient(ranks: Ranks, rng: Random) -> Work:
    """A number whose gradient is computed elsewhere."""
    shape = (rng.choice((1, 3)), 4)
    value = torch.randn(shape, generator=torch.Generator().manual_seed(0))

    def exact(weight: Tensor) -> Tensor:
        return _Given.apply(weight, value)  # type: ignore[no-any-return]

    def call(weight: Tensor) -> Tensor:
        return _Gradient.apply(weight, lambda: value.to(weight.device, weight.dtype))  # type: ignore[no-any-return]

    return Work(f"_Gradient on {shape}", {"weight": Operand(shape)}, call, exact)


class _Given(torch.autograd.Function):
    """Zero, with a given gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
        ctx.value = value.to(x.dtype)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.value.clone(), None


def leave_stage(ranks: Ranks, rng: Random) -> Work:
    """The end of a stage's graph, whose gradient comes from another stage."""
    shape = ranks.draw_shape(rng, 4)
    value = torch.randn(shape, generator=torch.Generator().manual_seed(1))

    def call(x: Tensor) -> Tensor:
        return _EndChunk.apply(_ReceivedGrads([value.to(x.device, x.dtype)]), x)  # type: ignore[no-any-return]

    return Work(f"_EndChunk on {shape}", {"x": Operand(shape)}, call, lambda x: _Given.apply(x, value))


def occupied(ranks: Ranks, rng: Random) -> Work:
    """A copy that takes time."""
    shape = ranks.draw_shape(rng, 4)

    def call(x: Tensor) -> Tensor:
        return _Occupied.apply(x, 0.0, None, lambda seconds: None)  # type: ignore[no-any-return]

    return Work(f"_Occupied on {shape}", {"x": Operand(shape)}, call, torch.clone, in_float64=True)


def record_backward(ranks: Ranks, rng: Random) -> Work:
    """An identity that records its backward pass."""
    shape = ranks.draw_shape(rng, 4)

    def call(x: Tensor) -> Tensor:
        return _Backward.apply(x, list[str](), "backward 0")  # type: ignore[no-any-return]

    return Work(f"_Backward on {shape}", {"x": Operand(shape)}, call, torch.clone, in_float64=True)


def cross_entropy(ranks: Ranks, rng: Random) -> Work:
    """Loss over a vocabulary that is cut over the ranks."""
    rows, vocab, width = rng.choice((1, 5, 8)), rng.choice((2, 5)), 4
    size, chunk_rows, padded = ranks.axis.size, rng.choice((1, 3, 100)), rng.random() < 0.5
    kernels = drawn_kernels(rng)
    first = torch.tensor([ranks.axis.rank * vocab, vocab])

    def targets(generator: torch.Generator, shape: Shape) -> Tensor:
        drawn = torch.randint(vocab * size - 1, shape, generator=generator)
        return torch.where(torch.rand(shape, generator=generator) < 0.3, IGNORE_INDEX, drawn)

    def padding(_: torch.Generator, shape: Shape) -> Tensor:
        values = torch.zeros(shape)
        if ranks.axis.rank == size - 1:
            values[..., -1] = float("-inf")
        return values

    def call(hidden: Tensor, weight: Tensor, target: Tensor, start: Tensor, pad: Tensor | None = None) -> Tensor:
        columns = VocabColumns(start, pad, ranks.comm, ranks.axis)
        given = (hidden, weight, target, columns, chunk_rows, _chunk_of(kernels), kernels)
        return _VocabCrossEntropy.apply(*given)  # type: ignore[no-any-return]

    def exact(hidden: Tensor, weight: Tensor, target: Tensor, start: Tensor, pad: Tensor | None = None) -> Tensor:
        own, others = F.linear(hidden, weight), F.linear(hidden.detach(), weight.detach())
        logits = torch.cat([own if rank == ranks.axis.rank else others for rank in range(size)], dim=-1)
        if pad is not None:
            logits = torch.cat([logits[:, :-1], torch.full_like(logits[:, :1], float("-inf"))], dim=-1)
        return F.cross_entropy(logits, target, ignore_index=IGNORE_INDEX, reduction="sum")

    operands = {
        "hidden": Operand((rows, width)),
        "weight": Operand((vocab, width)),
        "targets": Operand((rows,), targets, has_gradient=False),
        "first": Operand((2,), lambda _, s: first.clone(), forms=(WHOLE,), has_gradient=False),
    }
    if padded:
        operands["padding"] = Operand((vocab,), padding, torch.float32, (WHOLE,), has_gradient=False)
    sizes = f"{rows} rows, {vocab} entries, chunks of {chunk_rows}, tp {size}"
    label = f"_VocabCrossEntropy on {sizes}, {type(kernels).__name__}"
    return Work(label, operands, call, exact, once=True)


def token_cross_entropy(ranks: Ranks, rng: Random) -> Work:
    """Loss of each token over a vocabulary that is cut over the ranks, beside a frozen matrix or a trained one."""
    summed, is_frozen = cross_entropy(ranks, rng), rng.random() < 0.5
    kernels, chunk_rows = drawn_kernels(rng), rng.choice((1, 3, 100))
    operands = dict(summed.operands)
    if is_frozen:
        operands["weight"] = replace(operands["weight"], has_gradient=False)

    def call(hidden: Tensor, weight: Tensor, target: Tensor, start: Tensor, pad: Tensor | None = None) -> Tensor:
        columns = VocabColumns(start, pad, ranks.comm, ranks.axis)
        given = (hidden, weight, target, columns, chunk_rows, _chunk_of(kernels, token_losses=True), kernels)
        return _TokenCrossEntropy.apply(*given)  # type: ignore[no-any-return]

    def exact(hidden: Tensor, weight: Tensor, target: Tensor, *columns: Tensor) -> Tensor:
        tokens = zip(hidden.split(1), target.split(1), strict=True)
        return torch.stack([summed.exact(x, weight, one, *columns) for x, one in tokens])

    label = (
        f"_TokenCrossEntropy as {summed.label}, frozen {is_frozen}, chunks of {chunk_rows}, {type(kernels).__name__}"
    )
    return Work(label, operands, call, exact)


CASES: dict[type, Callable[[Ranks, Random], Work]] = {
    _SwiGLU: swiglu,
    _Rotate: rotate,
    _RMSNorm: norm,
    _BlockedAttention: attention,
    _WideFlashAttention: wide_flash,
    RangedAttention: ranged,
    SinkAttention: with_sinks,
    **CONTEXT_CASES,
    SavingProduct: product,
    _Biased: biased,
    _RestoredProduct: restored_product,
    _ColumnProduct: column_product,
    _SplitProduct: split_product,
    _Float8Product: float8_product,
    _Saved: chunks,
    _InChunks: chunks,
    _Gradient: gradient,
    _Spread: spread,
    _Collect: collect,
    ExpertProducts: expert_products,
    BlockProducts: block_products,
    _Blockwise: blockwise,
    GroupedProduct: grouped_product,
    _WithGradientOf: with_gradient_of,
    _AllToAll: all_to_all,
    _EndChunk: leave_stage,
    _Occupied: occupied,
    _Backward: record_backward,
    **REGION_CASES,
    _VocabCrossEntropy: cross_entropy,
    _TokenCrossEntropy: token_cross_entropy,
}
"""By function."""


NOT_ECHOED = (_TokenCrossEntropy, _VocabCrossEntropy, *CONTEXT_CASES)
"""Functions whose ranks have different inputs: several ranks need a process group."""
