"""A process of `nxtrain bench train`: one implementation, a turn for each line on standard input.

python -m nxtrain.tools.bench.worker NAME WORKLOAD
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeAlias

import torch
from torch import Tensor

from nxtrain.backends import open_backend
from nxtrain.backends.base import Backend
from nxtrain.backends.cpu import keep_heap
from nxtrain.backends.cpu_native.shared_memory import Exchange
from nxtrain.common.distributed.c10d_collectives import WaitClock
from nxtrain.common.errors import BackendError
from nxtrain.tools.bench.breakdown import EXCHANGE, UPDATE, WAIT, break_down
from nxtrain.tools.bench.clocks import Clocks
from nxtrain.tools.bench.gemm import peak
from nxtrain.tools.bench.peers import CLIP, LR, batch, transformers_step
from nxtrain.tools.bench.train import COMPILED, OURS, PEAK, PEER, PEER_COMPILED, PEER_DEFAULT, TITAN, Workload
from nxtrain.tools.bench.turns import serve
from nxtrain.train.step import TrainState

Step: TypeAlias = Callable[[], float]
"""One update; returns the loss, after which the device is idle."""

BREAKDOWN = "breakdown"
WARM_UP_STEPS = 3
PIPELINED = 8
"""Micro-batches of a pipeline's step, if its sequences can be so divided."""


def main(name: str, work: Workload) -> None:
    """Serve turns until standard input ends."""
    torch.set_num_threads(work.threads)
    serve(lambda: turns(name, work))


def turns(name: str, work: Workload) -> dict[str, Callable[[], dict[str, Any]]]:
    """Measurements of an implementation, by request."""
    if name in (OURS, COMPILED):
        backend = open_backend(work.backend)
        clocks = clocks_of(backend)
        step, state = ours(work, backend, compiled=name == COMPILED)
        return {"": timed(step, work.steps, clocks, backend), BREAKDOWN: parts(step, state, backend)}
    clocks, opened = peer_device(work)
    if name == PEAK:
        dtype = torch.bfloat16 if work.precision == "bf16" else torch.float32
        return {"": peak(clocks, dtype, on_host=work.backend in ("cpu", "xla"))}
    return {"": timed(peer_step(name, work, clocks), work.steps, clocks, opened)}


def peer_step(name: str, work: Workload, clocks: Clocks) -> Step:
    """Step of a peer."""
    if name == TITAN:
        from nxtrain.tools.bench.titan import titan_step

        return titan_step(work, clocks)
    how = {PEER_DEFAULT: (False, False), PEER: (True, False), PEER_COMPILED: (True, True)}
    fused, compiled = how[name]
    # torch has no fused AdamW for lazy tensors, whose compiler fuses anyway.
    return transformers_step(work, clocks, fused=fused and clocks.device.type != "xla", compiled=compiled)


def peer_device(work: Workload) -> tuple[Clocks, Backend | None]:
    """Device of a peer; on CPU without nxtrain's backend, but with its allocator settings unless they are refused."""
    if work.backend != "cpu":
        backend = open_backend(work.backend)
        return clocks_of(backend), backend
    if not work.stock_allocator:
        keep_heap()
    return Clocks(torch.device("cpu")), None


def clocks_of(backend: Backend) -> Clocks:
    """Clocks of a backend's device."""

    def read(x: Tensor) -> float:
        backend.step_boundary()
        return backend.fetch({"x": x})["x"]

    return Clocks(backend.device, read)


def ours(
    work: Workload,
    backend: Backend,
    *,
    compiled: bool = False,
    parallel: Mapping[str, Any] | None = None,
    micro_batches: int = 1,
) -> tuple[Step, TrainState]:
    """nxtrain's own step, as `nxtrain train` runs it, and its state.

    Args:
        work: Workload; with several ranks its batch is that of each rank.
        backend: Device, and ranks.
        compiled: compile.torch_compile.
        parallel: Table [parallel].
        micro_batches: Micro-batches of a step without a pipeline.
    """
    from nxtrain.common.family import find_family
    from nxtrain.config.check import Resolved
    from nxtrain.config.schema import RunConfig
    from nxtrain.train.build import build_model, build_state, mesh_of
    from nxtrain.train.step import DeviceBatch, train_step

    degrees = dict(parallel or {})
    sequences = work.batch * backend.world
    per_replica = work.batch * degrees.get("tp", 1) * degrees.get("pp", 1)
    if degrees.get("pp", 1) > 1:
        micro_batches = math.gcd(per_replica, PIPELINED)
    micro_batch = per_replica // micro_batches
    tables: dict[str, Any] = {
        "train": {"seq_len": work.seq_len, "global_batch": sequences, "micro_batch": micro_batch},
        "precision": {"params": work.precision, "update": "fp32_master" if work.precision == "bf16" else "fp32"},
        "optim": {"clip": CLIP},
        "compile": {"torch_compile": compiled},
        "parallel": degrees,
    }
    family = find_family("llama")
    plan = Resolved(RunConfig.model_validate(tables), family, family.config_type.model_validate(work.shape))
    mesh = mesh_of(plan, backend)
    state = build_state(plan, build_model(plan, backend, mesh, init="draw"), backend, mesh)
    inputs, targets = (x.unflatten(0, (mesh.dp.size, -1, micro_batch))[mesh.dp.rank] for x in batch(work, sequences))
    read = clocks_of(backend).read
    on_device = DeviceBatch.of(inputs, targets, backend.put)

    def step() -> float:
        return read(train_step(state, on_device, LR).loss)

    return step, state


def timed(step: Step, steps: int, clocks: Clocks, backend: Backend | None) -> Callable[[], dict[str, Any]]:
    """A turn of several steps: seconds by clock, wall seconds of each step, and the last loss.

    The first turn warms up, for which a lazy device and some compilers need a second and a third step.
    """
    remaining = iter((max(steps, WARM_UP_STEPS),))

    def turn() -> dict[str, Any]:
        step_s = []
        with clocks.measure() as seconds:
            for _ in range(next(remaining, steps)):
                began = time.perf_counter()
                loss = step()
                step_s.append(time.perf_counter() - began)
        if not math.isfinite(loss):
            raise BackendError(f"the loss is {loss}, so these steps are no training; see --precision")
        maker_flops = None
        notes: tuple[str, ...] = ()
        if backend is not None:
            maker_flops, notes = backend.diagnostics.peak_flops(), backend.notes()
        return {
            **seconds,
            "step_s": step_s,
            "loss": loss,
            "maker_flops": maker_flops,
            "device": clocks.device.type,
            "notes": notes,
        }

    return turn


def parts(step: Step, state: TrainState, backend: Backend) -> Callable[[], dict[str, Any]]:
    """A turn that profiles one step."""

    def turn() -> dict[str, Any]:
        marked = ((state.gradients, "norm"), (state.optimizer, "step"), (state.data_parallel, "publish"))
        for owner, method in marked:
            setattr(owner, method, _marked(getattr(owner, method)))
        try:
            with waits_marked():
                return break_down(step, on_device=backend.device.type != "cpu")
        finally:
            for owner, method in marked:
                delattr(owner, method)

    return turn


@contextmanager
def waits_marked() -> Iterator[None]:
    """Mark waits for other ranks in profiles, and the start of operations in shared memory."""
    start = Exchange.start
    methods = {name: getattr(WaitClock, name) for name in ("__enter__", "__exit__")}
    marks: list[torch.profiler.record_function] = []

    def enter_wait(clock: WaitClock) -> None:
        marks.append(torch.profiler.record_function(WAIT))
        marks[-1].__enter__()
        methods["__enter__"](clock)

    def exit_wait(clock: WaitClock, *error: object) -> None:
        methods["__exit__"](clock, *error)
        marks.pop().__exit__(None, None, None)

    try:
        for name, method in (("__enter__", enter_wait), ("__exit__", exit_wait)):
            setattr(WaitClock, name, method)
        Exchange.start = _marked(start, EXCHANGE)  # type: ignore[method-assign]
        yield
    finally:
        Exchange.start = start  # type: ignore[method-assign]
        for name, method in methods.items():
            setattr(WaitClock, name, method)


def _marked(method: Callable[..., Any], mark: str = UPDATE) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(mark):
            return method(*args, **kwargs)

    return call


if __name__ == "__main__":
    main(sys.argv[1], Workload(**json.loads(sys.argv[2])))
