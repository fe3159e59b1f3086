"""Rank process of `nxtrain bench pipeline`: training's pipeline executor with stages that only take time.

The stages sleep on CPUs. On a device they multiply matrices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from nxtrain.backends import open_backend
from nxtrain.backends.base import BackendSettings
from nxtrain.common.family import CausalLM
from nxtrain.common.mesh import Mesh
from nxtrain.common.stages import StagePart
from nxtrain.parallel.linear import Postpone, SplitBackward
from nxtrain.parallel.pipeline import Pipeline
from nxtrain.parallel.schedule import Action
from nxtrain.parallel.weight_grads import WeightGradients
from nxtrain.tools.bench.clocks import Clocks, Timestamps, clocks_of
from nxtrain.tools.bench.pipeline import BACKWARD, StageWork
from nxtrain.tools.bench.train import SHAPE

PATIENCE_S = 60.0

Occupy: TypeAlias = Callable[[float], None]
"""Function that takes a given number of seconds, by sleeping or by queuing device operations."""

WIDTH, MEASURED = 4096, 20
"""Rows and columns of the matrices that keep a device busy, and number of products in the calibration."""


def turns(_: str, job: Mapping[str, Any]) -> dict[str, Callable[[], dict[str, Any]]]:
    """Make the function that measures one pipeline step on one rank, in a worker process.

    The function runs the step with training's pipeline executor. It returns start and end of each action, and the bytes
    sent.
    """
    work = StageWork(**job)
    torch.set_num_threads(1)
    backend = open_backend(work.backend, BackendSettings(hang_timeout_s=PATIENCE_S))
    clocks = clocks_of(backend)
    moments = Timestamps(clocks)
    occupy: Occupy = time.sleep
    if clocks.has_events:
        occupy = _BusyProducts(clocks)
    mesh = Mesh.build(work.pp, backend.rank, pp=work.pp)
    backend.lay_out(mesh)
    blank = torch.zeros(work.seq_len, 1, SHAPE["hidden_size"], device=backend.device)
    last = work.pp * work.virtual_pp - 1
    stages = range(mesh.pp.rank, last + 1, work.pp)
    parts = [StagePart(range(stage, stage + 1), first=stage == 0, last=stage == last) for stage in stages]
    chunks = {str(stage): _BusyChunk(work.forward_s, occupy).to(backend.device) for stage in stages}
    actions: list[tuple[Action, int, int]] = []
    sent_bytes = 0

    @contextmanager
    def watch(action: Action) -> Iterator[None]:
        begin = moments.mark()
        yield
        actions.append((action, begin, moments.mark()))

    class Counted:
        """Wrapper of the collectives that counts the bytes sent."""

        def __getattr__(self, name: str) -> Any:
            return getattr(backend.collectives, name)

        def start_send(self, x: Tensor, *where: Any) -> Any:
            nonlocal sent_bytes
            sent_bytes += x.nbytes
            return backend.collectives.start_send(x, *where)

    model = _Chunks(chunks, blank)
    comm: Any = Counted()
    later = WeightGradients(model) if work.schedule == "zero_bubble" else None
    pipeline = Pipeline(cast(CausalLM, model), parts, mesh, comm, backend.step_boundary, [blank], later)
    pipeline.watch = watch
    tokens = backend.put(torch.zeros(1, work.seq_len, dtype=torch.int64))
    batch = [(tokens, tokens)] * work.micro

    def turn() -> dict[str, Any]:
        nonlocal sent_bytes
        backend.collectives.barrier()
        actions.clear()
        sent_bytes = 0
        moments.begin()
        pipeline.train(batch, lambda last: None, lambda loss, targets: loss)
        times_s = moments.times_s()
        spans = []
        for action, begin, end in actions:
            spans.append((action.kind, action.chunk, action.micro, times_s[begin], times_s[end]))
        return {"actions": spans, "sent_bytes": sent_bytes}

    return {"": turn}


class _Chunks(nn.Module):
    """Model of one rank: equal pipeline chunks without embedding and without LM head."""

    def __init__(self, chunks: Mapping[str, nn.Module], blank: Tensor) -> None:
        super().__init__()
        self._chunks = nn.ModuleDict(chunks)
        self.entry = nn.Parameter(blank.clone())

    def run(
        self, part: StagePart, state: Sequence[Tensor], targets: Tensor | None = None, starts: Tensor | None = None
    ) -> Sequence[Tensor]:
        del starts  # no attention
        x = self.entry if part.first else state[0]
        out: Tensor = self._chunks[str(part.blocks[0])](x)
        if targets is not None:
            out = out.sum()
        return (out,)


class _BusyProducts:
    """Callable that keeps a device busy for a number of seconds with matrix products.

    The number of products comes from a calibration when the object is made.
    """

    def __init__(self, clocks: Clocks) -> None:
        self._matrix = torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16, device=clocks.device)
        self._out = torch.empty_like(self._matrix)
        for _ in range(2):  # the first warms up
            with clocks.measure() as seconds:
                self._queue(MEASURED)
                clocks.read(self._out[0, 0])
        self._each_s = seconds["device"] / MEASURED

    def __call__(self, seconds: float) -> None:
        self._queue(max(1, round(seconds / self._each_s)))

    def _queue(self, number: int) -> None:
        for _ in range(number):
            torch.mm(self._matrix, self._matrix, out=self._out)


class _BusyChunk(SplitBackward):
    """Pipeline chunk that returns its input after a fixed time.

    A backward takes `BACKWARD` times as long as a forward. If the backward is split, each of its two parts takes half.
    """

    def __init__(self, forward_s: float, occupy: Occupy) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self._forward_s, self._occupy = forward_s, occupy

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Occupied.apply(x, self._forward_s, self.postpone, self._occupy)
        return out


class _Occupied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, postpone: Postpone | None, occupy: Occupy) -> Tensor:
        ctx.seconds = seconds
        ctx.postpone = postpone
        ctx.occupy = occupy
        occupy(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        seconds = BACKWARD * ctx.seconds
        if ctx.postpone is not None:
            seconds /= 2
            ctx.postpone(partial(_weight_part, seconds, ctx.occupy, grad.device))
        ctx.occupy(seconds)
        return grad.clone(), None, None, None


def _weight_part(seconds: float, occupy: Occupy, device: torch.device) -> Tensor:
    occupy(seconds)
    return torch.zeros((), device=device)
