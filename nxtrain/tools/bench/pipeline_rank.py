"""Rank of `nxtrain bench pipeline`: the executor that training uses, on chunks that sleep."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

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
from nxtrain.tools.bench.pipeline import BACKWARD, StageWork
from nxtrain.tools.bench.train import SHAPE

PATIENCE_S = 60.0


def turns(_: str, job: Mapping[str, Any]) -> dict[str, Callable[[], dict[str, Any]]]:
    """Turn of a rank in a worker process, by the executor that training uses.

    A turn measures begin and end of each action, and the bytes sent.
    """
    work = StageWork(**job)
    torch.set_num_threads(1)
    backend = open_backend("cpu", BackendSettings(hang_timeout_s=PATIENCE_S))
    mesh = Mesh.build(work.pp, backend.rank, pp=work.pp)
    backend.lay_out(mesh)
    blank = torch.zeros(work.seq_len, 1, SHAPE["hidden_size"])
    last = work.pp * work.virtual_pp - 1
    stages = range(mesh.pp.rank, last + 1, work.pp)
    parts = [StagePart(range(stage, stage + 1), first=stage == 0, last=stage == last) for stage in stages]
    chunks = {str(stage): _Sleeper(work.forward_s) for stage in stages}
    actions: list[tuple[str, int, int, float, float]] = []
    sent_bytes = 0

    @contextmanager
    def watch(action: Action) -> Iterator[None]:
        begin = time.monotonic()
        yield
        actions.append((action.kind, action.chunk, action.micro, begin, time.monotonic()))

    class Counted:
        """Collectives that count the bytes sent."""

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
    tokens = torch.zeros(1, work.seq_len, dtype=torch.int64)
    batch = [(tokens, tokens)] * work.micro

    def turn() -> dict[str, Any]:
        nonlocal sent_bytes
        backend.collectives.barrier()
        actions.clear()
        sent_bytes = 0
        pipeline.train(batch, lambda last: None, lambda loss, targets: None)
        return {"actions": actions, "sent_bytes": sent_bytes}

    return {"": turn}


class _Chunks(nn.Module):
    """Model of one rank: equal chunks, the first without embedding, the last without head."""

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


class _Sleeper(SplitBackward):
    """Chunk that sleeps and uses no core; each part of a split backward takes half of the time."""

    def __init__(self, forward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self._forward_s = forward_s

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Sleep.apply(x, self._forward_s, self.postpone)
        return out


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, postpone: Postpone | None) -> Tensor:
        ctx.seconds, ctx.postpone = seconds, postpone
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        seconds = BACKWARD * ctx.seconds
        if ctx.postpone is not None:
            seconds /= 2
            ctx.postpone(partial(_sleep, seconds))
        time.sleep(seconds)
        return grad.clone(), None, None


def _sleep(seconds: float) -> Tensor:
    time.sleep(seconds)
    return torch.zeros(())
