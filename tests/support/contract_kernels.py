"""Cases of `tests.support.contract` for every operation of `Kernels`, whoever implements it."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor

from nxtrain.backends.rounding import mix_, step_hash
from nxtrain.backends.torch_kernels import constant_means
from nxtrain.common.distributed.c10d_collectives import C10dCollectives
from nxtrain.common.kernels import AdamStep, Kernels, MeanDecay, RoundingKey
from nxtrain.common.mesh import Mesh
from nxtrain.common.vocab import IGNORE_INDEX, PROBABILITY_UNITS, VocabColumns
from tests.support.contract import (
    BOUNDS,
    CONTIGUOUS,
    WHOLE,
    Operand,
    Shape,
    Update,
    Work,
    compare,
)
from tests.support.contract_experts import grouped_gradient, grouped_matmul
from tests.support.contract_ranges import LENGTHS, Values, attend, attend_backward, drawn_starts, sink_attention
from tests.support.float8 import float8_matmul

LARGEST_ROUNDED = 3e38
EPS = 1e-5


def linear(kernels: Kernels, rng: Random) -> Work:
    """A product with a weight."""
    x, rows = (rng.choice((1, 3)), rng.choice((1, 2)), rng.choice((1, 4))), rng.choice((1, 3))
    operands = {"x": Operand(x), "weight": Operand((rows, x[-1]))}
    label = f"linear of {type(kernels).__name__} on {x} and {rows} rows"
    return Work(label, operands, kernels.linear, F.linear)


def matmul(kernels: Kernels, rng: Random) -> Update:
    """A product of matrices, without a gradient."""
    (m, k, n), lead = (rng.choice((1, 3, 40)) for _ in range(3)), rng.choice(((), (2,)))
    results: list[Tensor] = []

    def check(before: Values, after: Values) -> None:
        a, b = before["a"], before["b"]
        error = (results[-1].double() - a.double() @ b.double()).norm()
        assert results[-1].dtype == a.dtype
        assert error <= BOUNDS[a.dtype] * a.double().norm() * b.double().norm()

    label = f"matmul of {type(kernels).__name__} on {(*lead, m, k)} and {(k, n)}"
    operands = {"a": Operand((*lead, m, k)), "b": Operand((k, n))}
    return Update(label, operands, lambda a, b: results.append(kernels.matmul(a, b).cpu()), check)


def add_product(kernels: Kernels, rng: Random) -> Update:
    """A product that is added to a sum in float32."""
    m, k, n = (rng.choice((1, 3, 40)) for _ in range(3))

    def check(before: Values, after: Values) -> None:
        a, b = before["a"], before["b"]
        error = after["total"].double() - before["total"].double() - a.double() @ b.double()
        assert error.norm() <= BOUNDS[a.dtype] * (a.double().norm() * b.double().norm() + before["total"].norm())

    operands = {"total": Operand((m, n), dtype=torch.float32, forms=CONTIGUOUS, written=True)}
    operands |= {"a": Operand((m, k)), "b": Operand((k, n))}
    return Update(f"add_product of {type(kernels).__name__} on {(m, k, n)}", operands, kernels.add_product, check)


def attention(kernels: Kernels, rng: Random) -> Work:
    """Grouped causal attention."""
    length, batch = rng.choice(LENGTHS), rng.choice((1, 2, 3))
    kv_heads, repeats, width = rng.choice((1, 2, 3)), rng.choice((1, 1, 2, 3)), rng.choice((2, 4, 8))
    q, kv = (length, batch, kv_heads * repeats, width), (length, batch, kv_heads, width)
    label = f"attention of {type(kernels).__name__} on {q} queries and {kv_heads} K/V heads"
    return Work(label, {"q": Operand(q), "k": Operand(kv), "v": Operand(kv)}, kernels.attention, exact_attention)


def document_attention(kernels: Kernels, rng: Random) -> Work:
    """Grouped causal attention inside of documents of drawn lengths."""
    length, batch = rng.choice(LENGTHS), rng.choice((1, 2, 3))
    kv_heads, repeats, width = rng.choice((1, 2, 3)), rng.choice((1, 2, 3)), rng.choice((2, 4, 8))
    q, kv = (length, batch, kv_heads * repeats, width), (length, batch, kv_heads, width)
    starts = drawn_starts(rng, batch, length)
    label = f"document_attention of {type(kernels).__name__} on {q} queries and {kv_heads} K/V heads"
    return Work(
        label,
        {"q": Operand(q), "k": Operand(kv), "v": Operand(kv)},
        lambda q, k, v: kernels.document_attention(q, k, v, starts.to(q.device)),
        lambda q, k, v: exact_attention(q, k, v, starts.to(q.device)),
    )


def exact_attention(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None = None) -> Tensor:
    """Softmax attention by its formula: each K/V head serves adjacent query heads, no query sees what follows it.

    With `starts` no query sees what lies before the first position of its document, either.
    """
    repeats = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(repeats, dim=2), v.repeat_interleave(repeats, dim=2)
    scores = torch.einsum("sbnh,tbnh->bnst", q, k) / q.shape[-1] ** 0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    if starts is not None:
        later = later | (torch.arange(q.shape[0], device=q.device) < starts[:, None, :, None])
    return torch.einsum("bnst,tbnh->sbnh", scores.masked_fill(later, float("-inf")).softmax(-1), v)


def rms_norm(kernels: Kernels, rng: Random) -> Work:
    """Normalization of rows."""
    shape: Shape = (rng.choice((1, 2, 5)), rng.choice((1, 2)), rng.choice((4, 7, 16)))
    shape = shape if rng.random() < 0.7 else shape[1:]
    label = f"rms_norm of {type(kernels).__name__} on {shape}"
    operands = {"x": Operand(shape), "weight": Operand(shape[-1:])}
    return Work(label, operands, lambda x, weight: kernels.rms_norm(x, weight, EPS), exact_rms_norm)


def exact_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """x / rms(x) * weight."""
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def swiglu(kernels: Kernels, rng: Random) -> Work:
    """A gated unit."""
    shape = swiglu_shape(rng)
    return Work(f"swiglu of {type(kernels).__name__} on {shape}", {"x": Operand(shape)}, kernels.swiglu, exact_swiglu)


def swiglu_shape(rng: Random) -> Shape:
    """(S, B, 2F) or (S, 2F), with odd F among them."""
    shape: Shape = (rng.choice((1, 2, 6)), rng.choice((1, 2)), 2 * rng.choice((1, 3, 8, 33)))
    return shape if rng.random() < 0.7 else shape[1:]


def exact_swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotate(kernels: Kernels, rng: Random) -> Work:
    """A rotation of pairs."""
    operands = rotated_operands(rng)
    label = f"rotate of {type(kernels).__name__} on {operands['x'].shape}"
    return Work(label, operands, kernels.rotate, exact_rotate)


def rotated_operands(rng: Random) -> dict[str, Operand]:
    """Heads and tables of angles."""
    half = rng.choice((1, 2, 4, 17))
    shape = (rng.choice((1, 2, 5)), rng.choice((1, 2)), rng.choice((1, 3)), 2 * half)
    table = Operand((shape[0], 1, 1, half), dtype=torch.float32, has_gradient=False)
    return {"x": Operand(shape), "cos": table, "sin": table}


def exact_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair of dimensions (i, i + H/2) as one complex number, times cos + i sin."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def cross_entropy(kernels: Kernels, rng: Random) -> Update:
    """Losses of tokens over columns that are all of the vocabulary, and the gradient of the logits."""
    rows, vocab, needs_grad = rng.choice((1, 5)), rng.choice((2, 5, 40)), rng.random() < 0.8
    padded, z_loss = rng.choice((0, 0, 1, vocab - 1)), rng.choice((0.0, 0.0, 0.1))
    axis, num_ids = Mesh.build(1, 0).tp, rng.choice((1, 1, 2, 4))
    results: list[tuple[Tensor, Tensor | None]] = []

    def targets(generator: torch.Generator, shape: Shape) -> Tensor:
        drawn = torch.randint(vocab - padded, (shape[0], num_ids), generator=generator)
        drawn[torch.rand(shape[0], generator=generator) < 0.3, 0] = IGNORE_INDEX
        if num_ids == 1:
            return drawn[:, 0]
        shares = torch.rand(drawn.shape, generator=generator).softmax(1)[:, 1:].mul(PROBABILITY_UNITS).long()
        return torch.cat([drawn, PROBABILITY_UNITS - shares.sum(1, keepdim=True), shares], dim=1)

    def call(logits: Tensor, target: Tensor) -> None:
        padding = torch.zeros(vocab).index_fill(0, torch.arange(vocab - padded, vocab), float("-inf"))
        columns = VocabColumns(
            torch.tensor([0, vocab], device=logits.device),
            padding.to(logits.device) if padded else None,
            C10dCollectives(1),
            axis,
        )
        losses, grad = kernels.cross_entropy(logits, target, columns, needs_grad=needs_grad, z_loss=z_loss)
        results.append((losses.cpu(), None if grad is None else grad.cpu()))

    def check(before: Values, after: Values) -> None:
        logits = before["logits"].double()
        exact = logits.clone().requires_grad_()
        kept = exact[:, : vocab - padded]
        given = before["target"]
        counts = (given if num_ids == 1 else given[:, 0]) != IGNORE_INDEX
        if num_ids == 1:
            wanted = F.cross_entropy(kept, given, ignore_index=IGNORE_INDEX, reduction="none")
        else:
            ids, units = given.chunk(2, dim=1)
            dense = torch.zeros_like(kept).scatter_add(1, ids.clamp(min=0), units.double() / PROBABILITY_UNITS)
            wanted = F.cross_entropy(kept, dense, reduction="none") * counts
        losses, grad = results[-1]
        if z_loss:
            added = z_loss * (kept.logsumexp(dim=1) * counts).square()
            compare("the z-loss", losses[1], added, torch.float32)
            compare("the losses", losses[0], wanted, torch.float32)
            wanted = wanted + added
        else:
            compare("the losses", losses, wanted, torch.float32)
        assert (grad is not None) == needs_grad
        if grad is not None:
            assert grad.dtype == before["logits"].dtype
            (wanted_grad,) = torch.autograd.grad(wanted.sum(), exact)
            compare("the gradient", grad, wanted_grad, grad.dtype)

    label = f"cross_entropy of {type(kernels).__name__} on {rows} rows, {vocab} columns, {padded} padded, {needs_grad}"
    label += f", z-loss {z_loss}, {num_ids} ids of a token"
    operands = {
        "logits": Operand((rows, vocab), forms=CONTIGUOUS, written=True),
        "target": Operand((rows,), targets, has_gradient=False),
    }
    if num_ids > 1:
        operands["target"] = Operand((rows, 2 * num_ids), targets, forms=(WHOLE,), has_gradient=False)
    return Update(label, operands, call, check)


def row_square_sums(kernels: Kernels, rng: Random) -> Update:
    """Sums of squares of rows."""
    shape = (rng.choice((1, 3)), rng.choice((1, 8, 700)))
    results: list[Tensor] = []

    def check(before: Values, after: Values) -> None:
        wanted = before["x"].double().square().sum(dim=1)
        torch.testing.assert_close(results[-1].double(), wanted, rtol=2e-6, atol=0)

    label = f"row_square_sums of {type(kernels).__name__} on {shape}"
    return Update(label, {"x": Operand(shape)}, lambda x: results.append(kernels.row_square_sums(x).cpu()), check)


def square_sums(kernels: Kernels, rng: Random) -> Update:
    """Sums of squares of whole tensors."""
    shapes = {"a": (rng.choice((1, 3)), 8), "b": (rng.choice((1, 70)),)}
    results: list[Tensor] = []

    def check(before: Values, after: Values) -> None:
        wanted = torch.stack([before[name].double().square().sum() for name in shapes])
        torch.testing.assert_close(results[-1].double(), wanted, rtol=2e-6, atol=0)

    label = f"square_sums of {type(kernels).__name__} on {shapes}"
    operands = {name: Operand(shape) for name, shape in shapes.items()}
    return Update(
        label, operands, lambda a, b: results.append(torch.stack([*kernels.square_sums([a, b])]).cpu()), check
    )


def recompute(kernels: Kernels, rng: Random) -> Work:
    """A product that the backward pass computes again."""
    shape = (rng.choice((1, 3)), rng.choice((1, 2)), 4)

    def function(x: Tensor, weight: Tensor, number: int) -> Tensor:
        return (x @ weight).tanh() * number + x

    label = f"recompute of {type(kernels).__name__} on {shape}"
    # torch-xla's own recomputation has no gradient where its first input needs none.
    operands = {"x": Operand(shape, always=True), "weight": Operand((4, 4))}
    return Work(
        label,
        operands,
        lambda x, weight: kernels.recompute(function, x, weight, 3),
        lambda x, weight: function(x, weight, 3),
        leaves_only=True,
    )


def bits(kernels: Kernels, rng: Random) -> Update:
    """A view of another type, or a copy."""
    shape = (rng.choice((1, 3)), rng.choice((1, 8)))
    results: list[Tensor] = []

    def check(before: Values, after: Values) -> None:
        assert torch.equal(results[-1], before["x"].contiguous().view(torch.int32))

    label = f"bits of {type(kernels).__name__} on {shape}"
    operands = {"x": Operand(shape, dtype=torch.float32)}
    return Update(label, operands, lambda x: results.append(kernels.bits(x).cpu().clone()), check)


def replace(kernels: Kernels, rng: Random) -> Update:
    """New values unless a mark says otherwise."""
    shape, marked = (rng.choice((1, 5)), rng.choice((1, 8))), rng.random() < 0.5
    dtype = rng.choice((torch.float32, torch.bfloat16))
    operands = {
        "x": Operand(shape, dtype=dtype, forms=CONTIGUOUS, written=True),
        "new": Operand(shape, dtype=rng.choice((torch.float32, torch.bfloat16))),
        "unless": Operand((), lambda _, s: torch.full(s, marked)),
    }

    def check(before: Values, after: Values) -> None:
        assert torch.equal(after["x"], before["x"] if marked else before["new"].to(dtype))

    return Update(f"replace of {type(kernels).__name__} on {shape} unless {marked}", operands, kernels.replace, check)


def adamw(kernels: Kernels, rng: Random) -> Update:
    """An update of one or two tensors, which may be rows of larger ones."""
    shapes = [(rng.choice((1, 3, 8)), rng.choice((1, 5, 16))) for _ in range(rng.choice((1, 2)))]
    skips: bool | None = rng.choice((None, True, False))
    operands: dict[str, Operand] = {}
    for i, shape in enumerate(shapes):
        for name in ("param", "grad", "exp_avg", "exp_avg_sq"):
            values = _squares if name == "exp_avg_sq" else None
            operands[f"{name}{i}"] = Operand(shape, values, torch.float32, CONTIGUOUS, written=True)
    scale = rng.choice((1.0, 0.25))
    for name, number in (("lr", 0.01), ("step", 3.0), ("grad_scale", scale)):
        operands[name] = Operand((), _constant(number), torch.float32)
    if skips is not None:
        operands["skip"] = Operand((), lambda _, s: torch.full(s, skips))
    betas, eps, decay = (0.9, 0.95), 1e-8, 0.1
    changes = rng.random() < 0.5
    of_rule = {"decay": decay, "keep": betas[1], "add": 1 - betas[1]}  # numbers that change are on the device
    for name in list(of_rule) if changes else rng.choice(([], ["decay"])):
        operands[name] = Operand((), _constant(of_rule[name]), torch.float32)

    def call(*given: Tensor) -> None:
        parts = dict(zip(operands, given, strict=True))
        numbers = parts["lr"], parts["step"], parts["grad_scale"]
        how = AdamStep(*numbers, betas, eps, parts.get("decay", decay), parts.get("skip"))
        if changes:
            first, second = constant_means(betas, how.step)
            means = first, MeanDecay(parts["keep"], parts["add"], second.correction)
            how = AdamStep(*numbers, betas, eps, parts["decay"], how.skip, means)
        lists = [
            [parts[f"{name}{i}"] for i in range(len(shapes))] for name in ("param", "grad", "exp_avg", "exp_avg_sq")
        ]
        kernels.adamw(lists[0], lists[1], lists[2], lists[3], how)

    def check(before: Values, after: Values) -> None:
        for i in range(len(shapes)):
            param, grad, mean, mean_sq = (
                before[f"{name}{i}"].double() for name in ("param", "grad", "exp_avg", "exp_avg_sq")
            )
            if skips:
                for name in ("param", "exp_avg", "exp_avg_sq"):
                    assert torch.equal(after[f"{name}{i}"], before[f"{name}{i}"]), f"{name} of a skipped update"
                continue
            grad = grad * scale
            mean = betas[0] * mean + (1 - betas[0]) * grad
            mean_sq = betas[1] * mean_sq + (1 - betas[1]) * grad.square()
            rms = (mean_sq / (1 - betas[1] ** 3)).sqrt()
            param = param * (1 - 0.01 * decay) - 0.01 * mean / (1 - betas[0] ** 3) / (rms + eps)
            for name, wanted in (("param", param), ("exp_avg", mean), ("exp_avg_sq", mean_sq)):
                torch.testing.assert_close(after[f"{name}{i}"].double(), wanted, rtol=2e-6, atol=2e-6)

    return Update(f"adamw of {type(kernels).__name__} on {shapes}, skip {skips}", operands, call, check)


def stochastic_round(kernels: Kernels, rng: Random) -> Update:
    """Rounding to a neighbour in bfloat16."""
    rows, columns = rng.choice((1, 3)), rng.choice((1, 4, 7))
    out_type = rng.choice((torch.float32, torch.bfloat16))
    is_special = rng.random() < 0.3
    first = rng.choice((0, 1))
    numbers = torch.arange(first, first + columns, dtype=torch.int32)
    hashes = mix_(numbers // 2)
    pairs = torch.cat([hashes[:1], hashes[1::2]]) if first else hashes[::2]

    def special(generator: torch.Generator, shape: Shape) -> Tensor:
        values = torch.randn(shape, generator=generator)
        return values.index_fill(-1, torch.tensor([0]), float("inf")) if is_special else values

    counts: tuple[tuple[str, Tensor], ...] = (
        ("rows", mix_(torch.arange(rows, dtype=torch.int32)) | 1),
        ("pairs", pairs),
        ("columns", hashes),
        ("odd", numbers % 2 == 1),
        ("step", step_hash(torch.tensor(float(rng.choice((1, 7)))))),
    )
    operands = {
        "x": Operand((rows, columns), special, torch.float32, CONTIGUOUS, written=True),
        "out": Operand((rows, columns), dtype=out_type, forms=CONTIGUOUS, written=True),
    }
    for name, value in counts:
        operands[name] = Operand(tuple(value.shape), _given(value), forms=(WHOLE,))

    def call(x: Tensor, out: Tensor, rows: Tensor, pairs: Tensor, columns: Tensor, odd: Tensor, step: Tensor) -> None:
        kernels.stochastic_round(x, out, RoundingKey(rows, pairs, columns, odd, bool(first), shared=False), step)

    def check(before: Values, after: Values) -> None:
        x, out = before["x"], after["out"].float()
        below = (x.view(torch.int32) & -0x10000).view(torch.float32)
        above = ((x.view(torch.int32) & -0x10000) + 0x10000).view(torch.float32)
        finite = x.abs() <= LARGEST_ROUNDED
        assert torch.equal(out[~finite], x[~finite])
        assert ((out == below) | (out == above))[finite].all(), "not one of the two nearest"

    label = f"stochastic_round of {type(kernels).__name__} on {(rows, columns)} to {out_type}"
    return Update(label, operands, call, check)


def _constant(number: float) -> Callable[[torch.Generator, Shape], Tensor]:
    return lambda _, shape: torch.full(shape, number)


def _given(value: Tensor) -> Callable[[torch.Generator, Shape], Tensor]:
    return lambda _, shape: value.clone()


def _squares(generator: torch.Generator, shape: Shape) -> Tensor:
    return torch.randn(shape, generator=generator).square()


CASES: dict[str, Callable[[Kernels, Random], Work | Update]] = {
    "linear": linear,
    "matmul": matmul,
    "add_product": add_product,
    "float8_matmul": float8_matmul,
    "grouped_matmul": grouped_matmul,
    "grouped_gradient": grouped_gradient,
    "document_attention": document_attention,
    "sink_attention": sink_attention,
    "attention": attention,
    "attend": attend,
    "attend_backward": attend_backward,
    "rms_norm": rms_norm,
    "swiglu": swiglu,
    "rotate": rotate,
    "cross_entropy": cross_entropy,
    "row_square_sums": row_square_sums,
    "square_sums": square_sums,
    "recompute": recompute,
    "adamw": adamw,
    "bits": bits,
    "replace": replace,
    "stochastic_round": stochastic_round,
}
"""By the operation's name."""

TAKE_NO_TENSORS = {"fuse", "tiles", "order", "grouping", "has_visible_keys"}
"""Operations that are given shapes, types, ranges or functions alone, or change the order of computations alone."""
