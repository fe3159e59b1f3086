"""`nxtrain bench xla`: host time of PyTorch/XLA per training step, for nxtrain and transformers.

Host time is the time to record, hash and launch the graphs. The benchmark also measures the time to trace one rank of a
large world. The model is narrow, so that its computation takes almost no time. It is deep, since the host time grows
with the number of operations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import count
from statistics import median
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from nxtrain.backends import open_backend
from nxtrain.backends.base import Backend
from nxtrain.backends.xla.environment import trace_environment
from nxtrain.common.errors import BackendError
from nxtrain.common.family import find_family
from nxtrain.common.mesh import Mesh
from nxtrain.config.check import Resolved
from nxtrain.config.schema import RunConfig
from nxtrain.tools.bench import harness
from nxtrain.tools.bench.train import OURS, PEER
from nxtrain.train.build import build_model, build_state
from nxtrain.train.device_batch import DeviceBatch
from nxtrain.train.step import train_step

TRACE = "trace"
WORLD, TP = 4096, 8  # world size and tensor parallel degree of the traced rank

LR, CLIP = 1e-4, 1.0


@dataclass(frozen=True)
class LazyWorkload:
    """Model depth, micro-batches and steps that every implementation runs."""

    layers: int
    micro_batches: int
    steps: int  # steps of each measurement
    seq_len: int = 32  # tokens per sequence; each micro-batch is one

    @property
    def shape(self) -> dict[str, Any]:
        """Model configuration under Hugging Face's field names."""
        return {
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": self.layers,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "max_position_embeddings": self.seq_len,
        }


def bench_xla(*, layers: int, micro_batches: int, rounds: int, steps: int, as_json: bool) -> None:
    """Measure the host time per step of nxtrain and transformers, and print the results."""
    for package in ("torch_xla", "transformers"):
        if find_spec(package) is None:
            raise BackendError(
                f"bench xla needs {package}, which is not installed: pip install 'nxtrain[xla]' transformers"
            )
    work = LazyWorkload(layers, micro_batches, steps)
    env = trace_environment(harness.environment(1))
    with ExitStack() as stack:
        sides: dict[str, Callable[[], float]] = {}
        for name in (OURS, PEER, TRACE):
            sides[name] = stack.enter_context(harness.BenchWorker("xla", name, asdict(work), env)).turn
        result = summarize(harness.take_turns(sides, rounds))
    document = {**asdict(work), "rounds": rounds, **result}
    harness.present(document, lambda: [_table(document)], as_json=as_json, of_machine=False)


def summarize(measured: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Medians over rounds: host milliseconds per step of both implementations, seconds to trace one rank."""
    ratios = [peer / ours for ours, peer in zip(measured[OURS], measured[PEER], strict=True)]
    return {
        **{name: {"host_ms_per_step": 1e3 * median(measured[name])} for name in (OURS, PEER)},
        "ratio": median(ratios),
        "ratios": ratios,
        "trace_s_per_rank": median(measured[TRACE]),
    }


def _table(result: Mapping[str, Any]) -> Table:
    rows = [(name, f"{result[name]['host_ms_per_step']:.1f}") for name in (OURS, PEER)]
    caption = (
        f"transformers takes {result['ratio']:.2f} x as long; one rank of {WORLD} is traced in "
        f"{result['trace_s_per_rank']:.2f} s; medians over {len(result['ratios'])} rounds"
    )
    title = f"{result['layers']} layers, {result['micro_batches']} micro-batches per step"
    return harness.table(title, ("", "host ms per step"), rows, caption)


def turns(name: str, job: Mapping[str, Any]) -> dict[str, Callable[[], float]]:
    """Make the function that measures one implementation in a worker process and returns seconds."""
    sides = {OURS: ours, PEER: peer, TRACE: trace_a_rank}
    return {"": sides[name](LazyWorkload(**job))}


def ours(work: LazyWorkload) -> Callable[[], float]:
    """Make a function that runs nxtrain's training steps as `nxtrain train` does, and returns host seconds per step."""
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
    """Make a function that runs transformers' training steps, and returns host seconds per step.

    The steps follow PyTorch/XLA's documentation: one graph per micro-batch, and torch's AdamW.
    """
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
    """Make a function that returns the seconds of tracing one rank, as `nxtrain graphs` does."""
    from nxtrain.tools.trace.trace import trace

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
    """Make a function that returns the host seconds per training step.

    The device's computation ends between steps and is not timed.
    """

    def turn() -> float:
        total = 0.0
        for _ in range(steps):
            begin = time.perf_counter()
            loss = step()
            total += time.perf_counter() - begin
            backend.fetch({"loss": loss})
        return total / steps

    return turn
