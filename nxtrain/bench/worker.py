"""A process of `nxtrain bench train`: one implementation, a turn for each line on standard input.

python -m nxtrain.bench.worker NAME WORKLOAD
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from nxtrain.bench.train import OURS, PEAK, PEER, Workload

LR, CLIP = 1e-4, 1.0
GEMM_SHAPES = ((2048, 512, 512), (2048, 512, 2816), (2048, 2048, 2048))
"""Rows, inner size and columns; the fastest counts as the peak."""


def main(name: str, work: Workload) -> None:
    """Serve turns until standard input ends; each prints seconds, or FLOPs per second for the peak."""
    turn = {OURS: ours, PEER: peer, PEAK: peak}[name](work)
    for _ in sys.stdin:
        print(turn(), flush=True)


def ours(work: Workload) -> Callable[[], float]:
    """nxtrain's own step, as `nxtrain train` runs it."""
    from nxtrain.backends import open_backend
    from nxtrain.config.check import Resolved
    from nxtrain.config.schema import RunConfig
    from nxtrain.family import find_family
    from nxtrain.mesh import Mesh
    from nxtrain.train.build import build_model, build_state
    from nxtrain.train.step import DeviceBatch, train_step

    tables = {
        "train": {"seq_len": work.seq_len, "global_batch": work.batch, "micro_batch": work.batch},
        "precision": {"params": work.precision, "update": "fp32_master" if work.precision == "bf16" else "fp32"},
        "optim": {"clip": CLIP},
    }
    family = find_family("llama")
    plan = Resolved(RunConfig.model_validate(tables), family, family.config_type.model_validate(work.shape))
    backend, mesh = open_backend("cpu"), Mesh.build(1, 0)
    state = build_state(plan, build_model(plan, backend, mesh, init="draw"), backend, mesh)
    inputs, targets = _data(work)

    def step() -> float:
        result = train_step(state, DeviceBatch([inputs], [targets]), LR)
        return backend.fetch({"loss": result.loss})["loss"]

    return _timed(step, work.steps)


def peer(work: Workload) -> Callable[[], float]:
    """transformers' model as its documentation trains it: eager, torch's AdamW with its defaults."""
    import transformers

    config = transformers.LlamaConfig(**work.shape, attn_implementation="sdpa")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16 if work.precision == "bf16" else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    inputs, targets = _data(work)

    def step() -> float:
        # `shift_labels` are targets as they stand, so both sides count the same tokens.
        loss = model(input_ids=inputs, labels=targets, shift_labels=targets).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return _timed(step, work.steps)


def peak(work: Workload) -> Callable[[], float]:
    """The fastest matrix product: FLOPs per second."""
    dtype = torch.bfloat16 if work.precision == "bf16" else torch.float32
    pairs = [(torch.randn(m, k, dtype=dtype), torch.randn(n, k, dtype=dtype)) for m, k, n in GEMM_SHAPES]

    def turn() -> float:
        best = 0.0
        for left, right in pairs:
            flops = 2 * left.shape[0] * left.shape[1] * right.shape[0]
            for _ in range(10):
                begin = time.perf_counter()
                torch.nn.functional.linear(left, right)
                best = max(best, flops / (time.perf_counter() - begin))
        return best

    return turn


def _data(work: Workload) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, work.shape["vocab_size"], (work.batch, work.seq_len + 1), generator=generator)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def _timed(step: Callable[[], float], steps: int) -> Callable[[], float]:
    def turn() -> float:
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        return time.perf_counter() - begin

    return turn


if __name__ == "__main__":
    main(sys.argv[1], Workload(**json.loads(sys.argv[2])))
