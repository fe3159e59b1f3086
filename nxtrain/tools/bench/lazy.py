"""A process of `nxtrain bench xla`: one implementation, a turn for each line on standard input.

python -m nxtrain.tools.bench.lazy NAME WORKLOAD
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import Tensor

from nxtrain.backends import open_backend
from nxtrain.backends.base import Backend
from nxtrain.common.family import find_family
from nxtrain.common.mesh import Mesh
from nxtrain.config.check import Resolved
from nxtrain.config.schema import RunConfig
from nxtrain.tools.bench.train import OURS, PEER
from nxtrain.tools.bench.xla import TP, TRACE, WORLD, LazyWorkload
from nxtrain.tools.trace.trace import trace
from nxtrain.train.build import build_model, build_state
from nxtrain.train.step import DeviceBatch, train_step

LR, CLIP = 1e-4, 1.0


def main(name: str, work: LazyWorkload) -> None:
    """Serve turns until standard input ends; each prints seconds."""
    turn = {OURS: ours, PEER: peer, TRACE: trace_a_rank}[name](work)
    for _ in sys.stdin:
        print(turn(), flush=True)


def ours(work: LazyWorkload) -> Callable[[], float]:
    """nxtrain's own step, as `nxtrain train` runs it: seconds per step."""
    plan = _plan(work)
    backend = open_backend("xla")
    mesh = Mesh.build(1, 0)
    state = build_state(plan, build_model(plan, backend, mesh, init="draw"), backend, mesh)
    rows = _rows(work)

    def step() -> Tensor:
        batch = DeviceBatch.of(rows[..., :-1], rows[..., 1:], backend.put)
        loss = train_step(state, batch, LR).loss
        backend.step_boundary()
        return loss

    return _timed(step, backend, work.steps)


def peer(work: LazyWorkload) -> Callable[[], float]:
    """transformers' model as PyTorch/XLA's documentation trains one: a cut per micro-batch, torch's AdamW."""
    import transformers

    backend = open_backend("xla")
    config = transformers.LlamaConfig(**work.shape, attn_implementation="sdpa", use_cache=False)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(backend.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    rows = _rows(work)

    def step() -> Tensor:
        total = torch.zeros((), device=backend.device)
        for row in rows:
            inputs, targets = backend.put(row[:, :-1]), backend.put(row[:, 1:].contiguous())
            loss = model(input_ids=inputs, labels=targets, shift_labels=targets).loss
            loss.backward()
            total = total + loss.detach()
            if len(rows) > 1:
                backend.step_boundary()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        backend.step_boundary()
        return total

    return _timed(step, backend, work.steps)


def trace_a_rank(work: LazyWorkload) -> Callable[[], float]:
    """Time the trace that `nxtrain graphs` makes of one rank, in seconds."""
    plan = _plan(work, parallel={"tp": TP, "sequence_parallel": True})
    ranks = count()

    def turn() -> float:
        traced = trace(plan, WORLD, [next(ranks)], steps=2, hlo=None)
        seconds: float = traced["seconds"][0]
        return seconds

    return turn


def _plan(work: LazyWorkload, **tables: dict[str, Any]) -> Resolved:
    dp = WORLD // TP if tables else 1
    batches = {"seq_len": work.seq_len, "global_batch": work.micro_batches * dp, "micro_batch": 1}
    family = find_family("llama")
    config = RunConfig.model_validate({"train": batches, "optim": {"clip": CLIP}, **tables})
    return Resolved(config, family, family.config_type.model_validate(work.shape))


def _rows(work: LazyWorkload) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    shape = (work.micro_batches, 1, work.seq_len + 1)
    return torch.randint(0, work.shape["vocab_size"], shape, generator=generator)


def _timed(step: Callable[[], Tensor], backend: Backend, steps: int) -> Callable[[], float]:
    """Seconds per step until it is handed over; what it computes is waited for in between."""

    def turn() -> float:
        total = 0.0
        for _ in range(steps):
            begin = time.perf_counter()
            loss = step()
            total += time.perf_counter() - begin
            backend.fetch({"loss": loss})
        return total / steps

    return turn


if __name__ == "__main__":
    main(sys.argv[1], LazyWorkload(**json.loads(sys.argv[2])))
