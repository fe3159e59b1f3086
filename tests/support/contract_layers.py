"""Cases of `tests.support.contract` for the layers of every `LayerSet`, on ranks that have the same shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from nxtrain.backends.base import Backend
from nxtrain.common.dimensions import MoeShape
from nxtrain.common.kernels import Kernels
from nxtrain.common.layers import Head, LayerSet
from nxtrain.common.mesh import Mesh
from nxtrain.common.sharding import Init, Segment
from nxtrain.common.vocab import IGNORE_INDEX
from nxtrain.nn.init import materialize
from nxtrain.parallel.linear import Product, SplitBackward
from nxtrain.parallel.native import NativeLayers
from tests.support import contract_functions, contract_kernels
from tests.support.contract import CONTIGUOUS, FORMS, Operand, Placed, Setting, Shape, Watch, Work, hold, place
from tests.support.contract_experts import drawn_indices, exact_mixture, integers
from tests.support.contract_functions import Ranks
from tests.support.contract_kernels import exact_attention

WIDTH = 4

MakeLayers = Callable[[Ranks, torch.dtype, bool], LayerSet]
"""The layers of a rank in a type, with or without sequence parallelism."""

Put = Callable[[Tensor], Tensor]


def native(ranks: Ranks, dtype: torch.dtype, sequence_parallel: bool) -> LayerSet:
    """Our own, whose loss goes through the logits of a few tokens at a time."""
    return NativeLayers(ranks.parallel(dtype, sequence_parallel), loss_chunk_bytes=64)


class _Loss(nn.Module):
    """A head that is called for its loss."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return self.head.loss(hidden, targets)


class _Logits(_Loss):
    """A head that is called for its scores."""

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return self.head.logits(hidden)


def _made(layer: nn.Module, put: Put) -> nn.Module:
    materialize(layer, put, lambda _, local: None)
    return layer


def _caller(layer: nn.Module, postponed: list[Product] | None = None) -> Callable[..., Tensor]:
    """A layer as a function of its input, its weight and the rest."""
    (name,) = (name for name, _ in layer.named_parameters())
    if postponed is not None:
        assert isinstance(layer, SplitBackward)
        layer.postpone = postponed.append

    def call(x: Tensor, weight: Tensor, *rest: Tensor) -> Tensor:
        return functional_call(layer, {name: weight}, (x, *rest))  # type: ignore[no-any-return]

    return call


def column(make: MakeLayers, ranks: Ranks, rng: Random, dtype: torch.dtype, put: Put) -> Work:
    """A layer that cuts its outputs."""
    sequence_parallel, out = rng.random() < 0.5, rng.choice((2, 3))
    layers = make(ranks, dtype, sequence_parallel)
    with torch.device("meta"):
        layer = layers.column(WIDTH, (Segment("a", out * ranks.axis.size),), Init())
    shape = ranks.draw_shape(rng, WIDTH)
    postponed: list[Product] | None = [] if isinstance(layer, SplitBackward) and rng.random() < 0.4 else None

    def exact(x: Tensor, weight: Tensor) -> Tensor:
        x = ranks.heard(x)
        return F.linear(ranks.gathered(x) if layers.sequence_parallel else x, weight)

    operands = {"x": Operand(shape, always=True), "weight": Operand((out, WIDTH), forms=CONTIGUOUS)}
    label = f"column on {shape}, {_where(layers)}, postponed {postponed is not None}"
    return Work(label, operands, _caller(_made(layer, put), postponed), exact, _later(postponed))


def row(make: MakeLayers, ranks: Ranks, rng: Random, dtype: torch.dtype, put: Put) -> Work:
    """A layer that cuts its inputs."""
    layers = make(ranks, dtype, rng.random() < 0.5)
    width = rng.choice((2, 3))
    with torch.device("meta"):
        layer = layers.row(width * ranks.axis.size, WIDTH, Init())
    shape = ranks.draw_shape(rng, width)
    postponed: list[Product] | None = [] if isinstance(layer, SplitBackward) and rng.random() < 0.4 else None

    def exact(x: Tensor, weight: Tensor) -> Tensor:
        out = F.linear(x, weight)
        return ranks.scattered(out) if layers.sequence_parallel else ranks.summed(out)

    operands = {"x": Operand(shape, always=True), "weight": Operand((WIDTH, width), forms=CONTIGUOUS)}
    label = f"row on {shape}, {_where(layers)}, postponed {postponed is not None}"
    return Work(label, operands, _caller(_made(layer, put), postponed), exact, _later(postponed))


def embedding(make: MakeLayers, ranks: Ranks, rng: Random, dtype: torch.dtype, put: Put) -> Work:
    """A lookup of tokens."""
    layers, vocab = make(ranks, dtype, rng.random() < 0.5), rng.choice((2, 5))
    size = ranks.axis.size
    with torch.device("meta"):
        layer = layers.embedding(vocab * size, WIDTH, Init())
    shape = ranks.draw_shape(rng, WIDTH)[:2]

    def tokens(generator: torch.Generator, drawn: Shape) -> Tensor:
        return torch.randint(vocab * size, drawn, generator=generator)

    def exact(x: Tensor, weight: Tensor) -> Tensor:
        out = F.embedding(x, ranks.gathered(weight))
        if not layers.sequence_parallel:
            return out
        parts = out.chunk(size)
        total = sum(parts[1:], parts[0])
        return total + (parts[ranks.axis.rank] - total).detach()

    operands = {
        "tokens": Operand(shape, tokens, has_gradient=False),
        "weight": Operand((vocab, WIDTH), forms=CONTIGUOUS, always=True),
    }
    return Work(f"embedding of {shape}, {_where(layers)}", operands, _caller(_made(layer, put)), exact)


def loss(make: MakeLayers, ranks: Ranks, rng: Random, dtype: torch.dtype, put: Put) -> Work:
    """The loss of a head."""
    layers, vocab = make(ranks, dtype, rng.random() < 0.5), rng.choice((2, 5))
    size = ranks.axis.size
    with torch.device("meta"):
        head = _Loss(layers.head(vocab * size, WIDTH, Init()))
    shape = ranks.draw_shape(rng, WIDTH)
    rows = shape[0] * size if layers.sequence_parallel else shape[0]

    def targets(generator: torch.Generator, drawn: Shape) -> Tensor:
        chosen = torch.randint(vocab * size, drawn, generator=generator)
        return torch.where(torch.rand(drawn, generator=generator) < 0.3, IGNORE_INDEX, chosen)

    def exact(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        whole = ranks.gathered(hidden) if layers.sequence_parallel else hidden
        logits = F.linear(whole, ranks.gathered(weight)).flatten(0, 1)
        return F.cross_entropy(logits, target.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")

    operands = {
        "hidden": Operand(shape),
        "weight": Operand((vocab, WIDTH), forms=CONTIGUOUS),
        "targets": Operand((rows, shape[1]), targets, has_gradient=False),
    }
    return Work(f"loss on {shape}, {_where(layers)}", operands, _caller(_made(head, put)), exact, once=True)


def logits(make: MakeLayers, ranks: Ranks, rng: Random, dtype: torch.dtype, put: Put) -> Work:
    """The scores of a head."""
    layers, vocab = make(ranks, dtype, rng.random() < 0.5), rng.choice((2, 5))
    with torch.device("meta"):
        head = _Logits(layers.head(vocab * ranks.axis.size, WIDTH, Init()))
    shape = ranks.draw_shape(rng, WIDTH)

    def exact(hidden: Tensor, weight: Tensor, _: Tensor) -> Tensor:
        whole = ranks.gathered(hidden) if layers.sequence_parallel else hidden
        return F.linear(whole, ranks.gathered(weight))

    operands = {
        "hidden": Operand(shape, has_gradient=False),
        "weight": Operand((vocab, WIDTH), forms=CONTIGUOUS, has_gradient=False),
        "targets": Operand((), has_gradient=False),
    }
    return Work(f"logits on {shape}, {_where(layers)}", operands, _caller(_made(head, put)), exact)


def experts(make: MakeLayers, ranks: Ranks, rng: Random, dtype: torch.dtype, put: Put) -> Work:
    """Experts, whose inner widths are cut."""
    layers = make(ranks, dtype, rng.random() < 0.5)
    num, k, width = 3, rng.randint(1, 3), rng.choice((1, 2))
    mixture = MoeShape(num, k, width * ranks.axis.size)
    with torch.device("meta"):
        layer = layers.experts(WIDTH, mixture, Init(), Init(), capacity_factor=rng.choice((None, float(num))))
    _made(layer, put)
    shape = ranks.draw_shape(rng, WIDTH)
    indices = drawn_indices(rng, shape[0] * shape[1], k, num).view(*shape[:2], k)

    def call(x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        matrices = {"gate_up_proj.weight": gate_up, "down_proj.weight": down}
        return functional_call(layer, matrices, (x, weights, chosen))[0]  # type: ignore[no-any-return]

    def exact(x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        x, weights = ranks.heard(x), ranks.heard(weights)
        if layers.sequence_parallel:
            x, weights, chosen = ranks.gathered(x), ranks.gathered(weights), ranks.gathered(chosen)
        flat = (x.flatten(0, 1), weights.flatten(0, 1), chosen.flatten(0, 1))
        out = exact_mixture(*flat, gate_up, down, num).view(x.shape)
        return ranks.scattered(out) if layers.sequence_parallel else ranks.summed(out)

    operands = {
        "x": Operand(shape, always=True),
        "weights": Operand((*shape[:2], k), dtype=torch.float32),
        "indices": integers(indices),
        "gate_up": Operand((num * 2 * width, WIDTH), forms=CONTIGUOUS),
        "down": Operand((WIDTH, num * width), forms=CONTIGUOUS),
    }
    return Work(f"experts on {shape}, k {k}, {_where(layers)}", operands, call, exact)


def _later(postponed: list[Product] | None) -> Callable[[], Mapping[str, Tensor]] | None:
    return None if postponed is None else lambda: {"weight": postponed.pop()()}


def _where(layers: LayerSet) -> str:
    return f"{type(layers).__name__}, tp {layers.tp.size}, sequence parallel {layers.sequence_parallel}"


CASES: dict[str, tuple[Callable[[MakeLayers, Ranks, Random, torch.dtype, Put], Work], ...]] = {
    "column": (column,),
    "row": (row,),
    "embedding": (embedding,),
    "experts": (experts,),
    "head": (loss, logits),
}
"""By the method of `LayerSet` that makes the layer."""


DTYPES = (torch.float32, torch.bfloat16)


def ranks_of(backend: Backend) -> Ranks:
    """All ranks of the world, which share layers."""
    return Ranks(backend.collectives, Mesh.build(backend.world, backend.rank, tp=backend.world).tp)


def hold_functions(backend: Backend, names: Sequence[str], seed: int, draws: int) -> None:
    """Hold autograd functions; all ranks draw the same."""
    ranks = ranks_of(backend)
    for function, case in contract_functions.CASES.items():
        rng = Random(f"{seed} {function.__name__}")
        for _ in range(draws if function.__name__ in names else 0):
            dtype = rng.choice(DTYPES)
            hold(case(ranks, rng), Setting(rng, dtype, backend.device))


def hold_layers(backend: Backend, seed: int, draws: int) -> None:
    """Hold the layers of the set that the backend opened; all ranks draw the same."""
    mesh = Mesh.build(backend.world, backend.rank, tp=backend.world)
    ranks = ranks_of(backend)

    def make(ranks: Ranks, dtype: torch.dtype, sequence_parallel: bool) -> LayerSet:
        native = NativeLayers(ranks.parallel(dtype, sequence_parallel, backend.kernels), loss_chunk_bytes=64)
        return backend.binding.layers(native, mesh, dtype)

    for name, cases in CASES.items():
        rng = Random(f"{seed} {name}")
        for _ in range(draws):
            dtype, case = rng.choice(DTYPES), rng.choice(cases)
            hold(case(make, ranks, rng, dtype, backend.put), Setting(rng, dtype, backend.device))


def hold_collectives(backend: Backend, seed: int) -> None:
    """Hold every collective but the one that may work in place to keep its input, which is contiguous."""
    comm, axis = backend.collectives, ranks_of(backend).axis
    rng = Random(f"{seed} collectives")
    peer = 1 - axis.rank
    for form in (form for form in FORMS if form.name in {"whole", "rows", "viewed"}):
        for dtype in DTYPES:
            size = (2 * axis.size, 3)
            generator = torch.Generator().manual_seed(rng.getrandbits(30) + axis.rank)
            made = place(form, size, lambda s: torch.randn(s, generator=generator).to(dtype), device=backend.device)  # noqa: B023
            watch = Watch()
            watch.add(f"{form.name} {dtype}", made)
            comm.all_gather(made.x, axis)
            watch.check("all_gather")
            comm.start_reduce_scatter(made.x, axis, scale=0.5).wait()
            watch.check("reduce_scatter")
            comm.start_all_to_all(made.x, axis).wait()
            watch.check("all_to_all")
            (total,) = comm.start_all_reduce_bucket([made.x], axis, torch.float32, scale=0.5).wait()
            if axis.size > 1:
                total.zero_()  # it is the caller's
            watch.check("start_all_reduce_bucket")
            if axis.size == 2:
                comm.exchange(made.x, axis, peer)
                watch.check("exchange")
                _send_and_receive(backend, made, watch, peer)


def _send_and_receive(backend: Backend, made: Placed, watch: Watch, peer: int) -> None:
    comm, axis = backend.collectives, ranks_of(backend).axis
    if axis.rank == 0:
        comm.start_send(made.x, axis, peer).wait()
        comm.start_receive(made.x, axis, peer).wait()
    else:
        comm.start_receive(made.x, axis, peer).wait()
        comm.start_send(made.x, axis, peer).wait()
    watch.check("a transfer")


def flash(q: Tensor, k: Tensor, v: Tensor, **_: object) -> Tensor:
    """The formula in place of NKI's kernel: three of (B, N, H, S) to (B, N, S, H)."""
    return exact_attention(*(x.permute(3, 0, 1, 2) for x in (q, k, v))).permute(1, 2, 0, 3)


def hold_xla_kernels(backend: Backend, seed: int, draws: int) -> None:
    """Hold the kernels of XLA's devices, Trainium's among them."""
    from nxtrain.backends.neuron.backend import NeuronKernels
    from nxtrain.backends.xla.backend import XlaKernels

    every: list[Kernels] = [XlaKernels(), NeuronKernels(rounds=False, flash=flash)]
    for kernels in every:
        for name, case in contract_kernels.CASES.items():
            own = name in vars(type(kernels)) or isinstance(kernels, NeuronKernels) is False
            rng = Random(f"{seed} {name}")
            for _ in range(draws if own else 0):
                hold(case(kernels, rng), Setting(rng, rng.choice(DTYPES), backend.device))
