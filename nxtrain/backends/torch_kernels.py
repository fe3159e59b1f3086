"""Kernels made of torch operations: fused kernels for CPU and CUDA, and elementary operations for any device."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import checkpoint

from nxtrain.backends.limits import LONGEST_SCORES
from nxtrain.backends.ranged_attention import AttentionToRanges, Blocks, RangedAttention, SinkAttention, whole_rows
from nxtrain.backends.rounding import round_by_pairs, round_one_by_one
from nxtrain.backends.torch_attention import sdpa
from nxtrain.common.kernels import AdamStep, Float8Matrix, Kernels, KeyRanges, MeanDecay, RoundingKey, RowGroups, Rows
from nxtrain.common.vocab import PROBABILITY_UNITS, VocabColumns


class PlainKernels(Kernels):
    """Kernels of elementary operations; numbers that change per step are device tensors, so XLA graphs stay equal.

    Attributes:
        bounded: A vendor's attention for documents and windows; None to use elementary operations.
    """

    bounded: AttentionToRanges | None = None
    _blocks = Blocks()

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    def float8_matmul(self, a: Float8Matrix, b: Float8Matrix, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
        left, right = a.values.float(), b.values.float()
        if a.has_blocks:
            blocks = a.scales.shape[1]
            left = (left.unflatten(1, (blocks, -1)) * a.scales[..., None]).flatten(1)
            right = (right.unflatten(1, (blocks, -1)) * b.scales[..., None]).flatten(1)
        product: Tensor = left @ right.t()
        if not a.has_blocks:
            product = product * a.scales * b.scales.t()
        return product.to(dtype)

    def grouped_matmul(self, rows: Tensor, matrices: Tensor, groups: RowGroups) -> Tensor:
        assert groups.counts is not None, "the host multiplies group by group"
        out = rows.new_empty(rows.shape[0], matrices.shape[2])
        parts = zip(rows.split(groups.counts), matrices, out.split(groups.counts), strict=True)
        for own, matrix, product in parts:
            if len(own):
                product.copy_(self.matmul(own, matrix))
        return out

    def grouped_gradient(self, left: Tensor, right: Tensor, groups: RowGroups, out: Tensor) -> None:
        assert groups.counts is not None, "the host multiplies group by group"
        parts = zip(left.split(groups.counts), right.split(groups.counts), out, strict=True)
        for own, others, product in parts:
            if len(own):
                product.copy_(self.matmul(own.t(), others))
            else:
                product.zero_()

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.shape[0] > LONGEST_SCORES:
            out: Tensor = RangedAttention.apply(q, k, v, whole_rows(q, None), self)
            return out
        return sdpa(q, k, v)

    def document_attention(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, window: int | None = None
    ) -> Tensor:
        kernels: AttentionToRanges = self
        if self.bounded is not None:
            kernels = self.bounded
        out: Tensor = RangedAttention.apply(q, k, v, whole_rows(q, starts, window), kernels)
        return out

    def has_visible_keys(self, ranges: KeyRanges) -> bool:
        if not self.host_reads_are_free:
            return True
        after = torch.searchsorted(ranges.keys, ranges.last, right=True)
        return bool((after > torch.searchsorted(ranges.keys, ranges.first.contiguous())).any())

    def sink_attention(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, starts: Tensor | None, window: int | None = None
    ) -> Tensor:
        out: Tensor = SinkAttention.apply(q, k, v, sinks, whole_rows(q, starts, window), self)
        return out

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ranges: KeyRanges) -> tuple[Tensor, Tensor]:
        return self._blocks.attend(q, k, v, ranges)

    def attend_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, ranges: KeyRanges
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._blocks.attend_backward(grad, q, k, v, out, log_sums, ranges)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        out: Tensor = _SwiGLU.apply(gate_up)
        return out

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        out: Tensor = _Rotate.apply(x, cos, sin)
        return out

    def cross_entropy(
        self, logits: Tensor, targets: Tensor, columns: VocabColumns, *, needs_grad: bool, z_loss: float = 0.0
    ) -> tuple[Tensor, Tensor | None]:
        return cross_entropy(logits, targets, columns, needs_grad=needs_grad, z_loss=z_loss)

    def recompute(self, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        # torch stops the second call after the last value that backward needs.
        out: Tensor = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
        return out

    def row_square_sums(self, x: Tensor) -> Tensor:
        norms: Tensor = torch.linalg.vector_norm(x, dim=1, dtype=torch.float32)
        return norms.square()

    def adamw(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        how: AdamStep,
    ) -> None:
        first, second = how.means or constant_means(how.betas, how.step)
        correction2 = second.correction.sqrt()
        for param, grad, exp_avg, exp_avg_sq in zip(params, grads, exp_avgs, exp_avg_sqs, strict=True):
            scaled = grad * how.grad_scale
            # Not in place: torch-xla checks the shapes of such operations in Python, at thrice the cost to the host.
            mean = exp_avg * first.keep + scaled * first.add
            mean_sq = exp_avg_sq * second.keep + scaled * scaled * second.add
            update = (mean / first.correction) / (mean_sq.sqrt() / correction2 + how.eps)
            updated = param * (1.0 - how.lr * how.weight_decay) - how.lr * update
            for x, new in ((exp_avg, mean), (exp_avg_sq, mean_sq), (param, updated)):
                x.copy_(new if how.skip is None else torch.where(how.skip, x, new))

    def bits(self, x: Tensor) -> Tensor:
        return x.view(torch.int32)

    def replace(self, x: Tensor, new: Tensor, unless: Tensor) -> None:
        x.copy_(torch.where(unless, x, new.to(x.dtype)))

    def stochastic_round(self, x: Tensor, out: Tensor, key: RoundingKey, step: Tensor) -> None:
        round_one_by_one(x, out, key, step, bitcast=torch.Tensor.view)


class FusedKernels(PlainKernels):
    """torch's fused attention and fused AdamW, for CPU and CUDA."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v)

    def adamw(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        how: AdamStep,
    ) -> None:
        if how.means is not None:  # torch's kernel assumes one beta for all updates in its bias correction
            super().adamw(params, grads, exp_avgs, exp_avg_sqs, how)
            return
        weight_decay = how.weight_decay
        if isinstance(weight_decay, Tensor):  # torch's kernel needs a host number, which would be a device-to-host copy
            shrink = 1.0 - how.lr * weight_decay
            if how.skip is not None:
                shrink = torch.where(how.skip, 1.0, shrink)
            torch._foreach_mul_(list(params), shrink)
            weight_decay = 0.0
        torch._fused_adamw_(
            list(params),
            list(grads),
            list(exp_avgs),
            list(exp_avg_sqs),
            [],
            [how.step] * len(params),
            lr=how.lr,
            beta1=how.betas[0],
            beta2=how.betas[1],
            weight_decay=weight_decay,
            eps=how.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=self._divisor(how.grad_scale),
            found_inf=None if how.skip is None else how.skip.float(),
        )

    def replace(self, x: Tensor, new: Tensor, unless: Tensor) -> None:
        torch.where(unless, x, new.to(x.dtype), out=x)

    def stochastic_round(self, x: Tensor, out: Tensor, key: RoundingKey, step: Tensor) -> None:
        round_by_pairs(x, out, key, step)

    def _divisor(self, grad_scale: Tensor) -> Tensor | None:
        """Divisor of the gradients for torch's fused AdamW; None means 1."""
        return grad_scale.reciprocal()


class SavingProduct(torch.autograd.Function):
    """Autograd function of `Kernels.linear` that saves no copies, and no input if the weight is frozen.

    torch's own function saves the transposed weight, and copies that a product makes of its arguments.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, kernels: Kernels) -> Tensor:
        ctx.kernels = kernels
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        return kernels.matmul(x, weight.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        x_grad, weight_grad = None, None
        if ctx.needs_input_grad[0]:
            x_grad = ctx.kernels.matmul(grad, weight)
        if x is not None:
            weight_grad = ctx.kernels.matmul(grad.flatten(0, -2).t(), x.flatten(0, -2))
        return x_grad, weight_grad, None


def constant_means(betas: tuple[float, float], step: Tensor) -> tuple[MeanDecay, MeanDecay]:
    """Weights of AdamW's running means with constant betas, after `step` updates."""
    beta1, beta2 = betas
    first = MeanDecay(beta1, 1.0 - beta1, bias_correction(beta1, step))
    return first, MeanDecay(beta2, 1.0 - beta2, bias_correction(beta2, step))


def bias_correction(beta: float, step: Tensor) -> Tensor:
    """Bias correction of an AdamW running mean: 1 - beta^step.

    Computed by expm1, since 1 - 0.999 has few digits in float32, and the first updates would have errors of 3e-5.

    Args:
        beta: Decay of the running mean.
        step: () float32, number of updates done.
    """
    return (step * (math.log(beta) if beta else -math.inf)).expm1().neg()


def row_tiles(shapes: Mapping[str, Sequence[int]], limit: int) -> Iterator[Rows]:
    """Split parameters into tiles of whole rows with at most `limit` entries, or of one row.

    Empty parameters have no tiles.
    """
    for name, (num_rows, *rest) in shapes.items():
        width = max(1, limit // max(1, math.prod(rest)))
        for start in range(0, num_rows, width):
            yield Rows(name, start, min(width, num_rows - start), whole=width >= num_rows)


class _RMSNorm(torch.autograd.Function):
    """Autograd function of RMS norm that saves only its input and one float32 number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x32 = x.float()
        rstd = torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, rstd)
        return (x32 * rstd * weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, rstd = ctx.saved_tensors
        normed = x.float() * rstd
        grad32 = grad.float()
        weight_grad = (grad32 * normed).flatten(0, -2).sum(dim=0)
        inner = grad32 * weight.float()
        x_grad = (inner - normed * (inner * normed).mean(dim=-1, keepdim=True)) * rstd
        return x_grad.to(x.dtype), weight_grad.to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute RMS norm (`Kernels.rms_norm`) by elementary operations."""
    out: Tensor = _RMSNorm.apply(x, weight, eps)
    return out


def _spare_compiler(hidden: Any) -> None:
    """Prevent a function that torch excludes from compilation from importing torch's compiler.

    The import takes seconds, and an eager run does not need the compiler. After another import of the compiler, torch
    excludes the function as usual.
    """
    plain: Any = getattr(hidden, "__wrapped__", None)

    def spared(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return plain(*args, **kwargs)
        vars(plain).pop("__dynamo_disable", None)
        return hidden(*args, **kwargs)

    if plain is not None and "torch._dynamo" not in sys.modules:
        plain.__dynamo_disable = spared  # the attribute in which torch caches the wrapper of its compiler


for _hidden in (checkpoint, getattr(torch_checkpoint, "_run_fn_with_dynamo_disabled", None)):
    _spare_compiler(_hidden)


class _SwiGLU(torch.autograd.Function):
    """Autograd function of silu(gate) * up that saves only its concatenated input and recomputes in backward."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        gate_grad = torch.ops.aten.silu_backward(grad * up, gate)
        return torch.cat([gate_grad, F.silu(gate).mul_(grad)], dim=-1)


class _Rotate(torch.autograd.Function):
    """Autograd function of rotary position embedding that saves only the tables; backward rotates by -sin."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def masked_cross_entropy(
    logits: Tensor, targets: Tensor, columns: VocabColumns, *, needs_grad: bool, z_loss: float = 0.0
) -> tuple[Tensor, Tensor | None]:
    """Compute `Kernels.cross_entropy` by masks of the targets instead of gather and scatter.

    For devices without 64-bit integers, on which gather and scatter by int64 are hundreds of times slower.
    """
    dtype = logits.dtype
    comm = columns.comm
    axis = columns.axis
    scores = logits.float() if columns.padding is None else logits.float() + columns.padding
    numbers = torch.arange(scores.shape[1], dtype=torch.int32, device=scores.device)
    taught = None
    if targets.dim() == 1:
        counted, here, column = columns.locate(targets)
        hit = (numbers == column.to(torch.int32)) & here.unsqueeze(1)
    else:
        counted, here, column, shares = _taught(targets, columns)
        wanted = torch.where(here, column.to(torch.int32), -1)
        taught = torch.zeros_like(scores)
        for of_id, share in zip(wanted.split(1, dim=1), shares.split(1, dim=1), strict=True):
            taught = taught + (numbers == of_id) * share
        hit = taught > 0.0

    peak = comm.all_reduce(scores.amax(dim=1), axis, "max")
    chosen = scores.masked_fill(~hit, 0.0)
    target_score = (chosen if taught is None else chosen * taught).sum(dim=1)
    exp = (scores - peak.unsqueeze(1)).exp()
    sums = comm.all_reduce(torch.stack([exp.sum(dim=1), target_score]), axis)
    losses, share = _losses(sums, peak, counted, z_loss)
    if not needs_grad:
        return losses, None
    grad = exp * share.unsqueeze(1) - (hit.float() if taught is None else taught)
    return losses, grad.to(dtype)


def cross_entropy(
    logits: Tensor, targets: Tensor, columns: VocabColumns, *, needs_grad: bool, z_loss: float = 0.0
) -> tuple[Tensor, Tensor | None]:
    """Compute `Kernels.cross_entropy` by elementary operations with gather and scatter."""
    dtype = logits.dtype
    comm = columns.comm
    axis = columns.axis
    scores = logits.float() if columns.padding is None else logits.float() + columns.padding
    peak = comm.all_reduce(scores.amax(dim=1), axis, "max")
    if targets.dim() == 1:
        counted, here, column = columns.locate(targets)
        shares = here.float().unsqueeze(1)
        target_score = torch.where(here, scores.gather(1, column).squeeze(1), torch.zeros_like(peak))
    else:
        counted, here, column, shares = _taught(targets, columns)
        target_score = (torch.where(here, scores.gather(1, column), 0.0) * shares).sum(dim=1)
    exp = scores.sub_(peak.unsqueeze(1)).exp_()
    sums = comm.all_reduce(torch.stack([exp.sum(dim=1), target_score]), axis)
    losses, share = _losses(sums, peak, counted, z_loss)
    if not needs_grad:
        return losses, None
    grad = exp.mul_(share.unsqueeze(1))
    grad.scatter_add_(1, column, -shares)
    return losses, grad.to(dtype)


def _taught(targets: Tensor, columns: VocabColumns) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Locate the teacher's top-R token ids of each target in this rank's logits, for distillation.

    Args:
        targets: (T, 2R) teacher targets; see `Kernels.cross_entropy`.

    Returns:
        (T,) bool, True for tokens that count in the loss. (T, R) bool, True for ids in this rank's columns. (T, R)
        columns of these ids, 0 for other ids. (T, R) float32 teacher probabilities, 0 for other ids.
    """
    ids, units = targets.chunk(2, dim=1)
    counted, here, column = columns.locate(ids.flatten())
    counted = counted.view(ids.shape)[:, 0]
    here = here.view(ids.shape) & counted.unsqueeze(1)
    shares = torch.where(here, units.float() / PROBABILITY_UNITS, 0.0)
    return counted, here, column.view(ids.shape), shares


def _losses(sums: Tensor, peak: Tensor, counted: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    """Return the losses of `Kernels.cross_entropy`, and the factor (T,) of exp(scores) in the gradient.

    Args:
        sums: (2, T), sum of the exponentials and score of the target, for each token.
        peak: (T,), maximum score of each token, which was subtracted from its scores.
        counted: (T,) bool, True for tokens that count in the loss.
        z_loss: See `Kernels.cross_entropy`.
    """
    logs = sums[0].log()
    # Not `(logs + peak) - sums[1]`: the sum may be large, and is rounded, while peak and score of a target are close.
    entropies = logs + (peak - sums[1])
    losses = torch.where(counted, entropies, torch.zeros_like(entropies))
    share = counted.float() / sums[0]
    if z_loss:
        log_sums = logs + peak
        squares = torch.where(counted, log_sums.square(), torch.zeros_like(entropies))
        losses = torch.stack([losses, z_loss * squares])
        share = share * (1.0 + 2.0 * z_loss * log_sums)
    return losses, share
