"""Training steps that the benchmarks measure: nxtrain's own, those of its peers, and peak matrix products.

`nxtrain bench train` and `nxtrain bench scaling` use them. All steps compute the same model on the same data with the
same clipping.
"""

from __future__ import annotations

import math
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
from nxtrain.backends.cpu_products import has_products
from nxtrain.checkpoint.convert.verify_export import of_type
from nxtrain.common.distributed.c10d_collectives import WAIT_CLOCK
from nxtrain.common.errors import BackendError
from nxtrain.common.family import find_family
from nxtrain.config.check import Resolved
from nxtrain.config.schema import RunConfig
from nxtrain.tools.bench.breakdown import EXCHANGE, UPDATE, WAIT, break_down
from nxtrain.tools.bench.clocks import Clocks, clocks_of
from nxtrain.tools.bench.train import BREAKDOWN, COMPILED, ON_HOST, OURS, PEAK, PEER, PEER_COMPILED, TITAN, Workload
from nxtrain.train.build import build_model, build_state, mesh_of
from nxtrain.train.device_batch import DeviceBatch
from nxtrain.train.step import TrainState, train_step

Step: TypeAlias = Callable[[], Tensor]  # queues one update; returns the loss, () on the device

Turn: TypeAlias = Callable[[], dict[str, Any]]

LR, CLIP = 1e-4, 1.0
WARM_UP_STEPS = 3
PIPELINED = 8  # micro-batches of a pipeline's step, if its sequences can be so divided


HOST_PRODUCTS = ((2048, 512, 512), (2048, 512, 2816), (2048, 2048, 2048))
DEVICE_PRODUCTS = ((8192, 8192, 8192), (8192, 4096, 14336))
"""Rows, inner size and columns of the matrix products that measure the peak FLOPs per second; the fastest counts."""

REPEATS = 10

QUEUED = 20
"""Matrix products per measurement on a device with a queue.

With so many products, the host's launch and read are a small share of the time.
"""


def turns(name: str, job: Mapping[str, Any]) -> dict[str, Turn]:
    """Make the functions that measure one candidate of `bench train` in a worker process, keyed by request."""
    work = Workload(**job)
    torch.set_num_threads(work.threads)
    if name in (OURS, COMPILED):
        backend = open_backend(work.backend)
        step, state = ours(work, backend, compiled=name == COMPILED)
        return {
            "": timed(step, work.steps, clocks_of(backend), backend, params=work.precision),
            BREAKDOWN: parts(step, state, backend),
        }
    opened: Backend | None = None
    clocks = Clocks(torch.device("cpu"))
    if work.backend != "cpu":
        opened = open_backend(work.backend)
        clocks = clocks_of(opened)
    elif not work.stock_allocator:
        keep_heap()  # peers get the allocator settings of nxtrain's CPU backend, but not the backend itself
    if name == PEAK:
        return {"": peak(clocks, dtype_of(work), on_host=work.backend in ON_HOST)}
    if name == TITAN:
        from nxtrain.tools.bench.titan import titan_step

        step = titan_step(work, clocks)
    else:
        # torch has no fused AdamW for lazy tensors, whose compiler fuses anyway.
        fused = name in (PEER, PEER_COMPILED) and clocks.device.type != "xla"
        step = transformers_step(work, clocks, fused=fused, compiled=name == PEER_COMPILED)
    return {"": timed(step, work.steps, clocks, opened, params=work.precision)}


def dtype_of(work: Workload) -> torch.dtype:
    """Dtype of the workload's weights and activations."""
    if work.precision == "bf16":
        return torch.bfloat16
    return torch.float32


def batch(work: Workload, sequences: int = 0) -> tuple[Tensor, Tensor]:
    """Make the batch of random token ids that every implementation trains on.

    Args:
        sequences: Number of sequences; 0: the workload's batch size.

    Returns:
        Inputs and targets, each (B, S).
    """
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, work.shape["vocab_size"], (sequences or work.batch, work.seq_len + 1), generator=generator)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def ours(
    work: Workload, backend: Backend, *, compiled: bool = False, parallel: Mapping[str, Any] | None = None
) -> tuple[Step, TrainState]:
    """Make nxtrain's own training step, as `nxtrain train` runs it.

    Each rank gets the batch size of the workload.

    Returns:
        The step function and its training state.
    """
    degrees = dict(parallel or {})
    sequences = work.batch * backend.world
    per_replica = work.batch * degrees.get("tp", 1) * degrees.get("pp", 1)
    micro_batches = 1
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
    plan = Resolved(RunConfig.model_validate(tables), find_family(work.family), work.model)
    mesh = mesh_of(plan, backend)
    state = build_state(plan, build_model(plan, backend, mesh, init="draw"), backend, mesh)
    inputs, targets = (x.unflatten(0, (mesh.dp.size, -1, micro_batch))[mesh.dp.rank] for x in batch(work, sequences))
    on_device = DeviceBatch.of(inputs, targets, backend.put)

    def step() -> Tensor:
        return train_step(state, on_device, LR).loss

    return step, state


def transformers_step(work: Workload, clocks: Clocks, *, fused: bool, compiled: bool) -> Step:
    """Make a training step of transformers' model, as its documentation trains it.

    Args:
        fused: Use torch's fused AdamW; otherwise AdamW with default settings.
        compiled: Compile the model with `torch.compile`.
    """
    import transformers

    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[work.family].from_dict(hf_config(work))
    config.use_cache = False
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", **of_type(dtype_of(work)))
    model = model.to(clocks.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True if fused else None)
    inputs, targets = (x.to(clocks.device) for x in batch(work))
    forward: Callable[..., Any] = model
    if compiled:
        forward = torch.compile(model, dynamic=False)

    def step() -> Tensor:
        # `shift_labels` are used as targets unshifted, so all implementations count the same tokens.
        loss: Tensor = forward(input_ids=inputs, labels=targets, shift_labels=targets).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def hf_config(work: Workload) -> dict[str, Any]:
    """Fields of the model's Hugging Face `config.json`, without its class name and dtype."""
    dtype = str(dtype_of(work)).removeprefix("torch.")
    config = find_family(work.family).to_hf(work.model, dtype)
    return {name: value for name, value in config.items() if name not in {"architectures", "dtype", "torch_dtype"}}


def peak(clocks: Clocks, dtype: torch.dtype, *, on_host: bool) -> Callable[[], dict[str, float]]:
    """Make a function that measures the peak FLOPs per second of matrix products.

    The function returns the best of several products by each clock.
    """
    shapes = HOST_PRODUCTS if on_host else DEVICE_PRODUCTS
    if on_host and not has_products(dtype):
        dtype = torch.float32
    pairs = []
    for m, k, n in shapes:
        left = torch.randn(m, k, dtype=dtype, device=clocks.device)
        pairs.append((left, torch.randn(n, k, dtype=dtype, device=clocks.device)))

    # A lazy device would compute equal products only once.
    queued = QUEUED if clocks.has_events else 1

    def products(left: Tensor, right: Tensor) -> Tensor:
        for _ in range(queued):
            out = torch.nn.functional.linear(left, right)
        clocks.read(out[0, 0])
        return out  # a lazy device computes only what still exists

    def turn() -> dict[str, float]:
        best: dict[str, float] = {}
        for left, right in pairs:
            flops = queued * 2 * left.shape[0] * left.shape[1] * right.shape[0]
            for _ in range(REPEATS):
                with clocks.measure() as seconds:
                    products(left, right)
                for clock, elapsed in seconds.items():
                    best[clock] = max(best.get(clock, 0.0), flops / elapsed)
        return best

    return turn


def timed(
    step: Step,
    steps: int,
    clocks: Clocks,
    backend: Backend | None,
    warm_up_steps: int = WARM_UP_STEPS,
    params: str = "bf16",
) -> Turn:
    """Make a function that times several training steps.

    The function returns the seconds by each clock and the last loss. It also returns the wall seconds per step, and
    those of the process's first step. The first measurement warms up, since lazy devices and some compilers need a
    second and a third step. Later measurements queue their steps and read only the last loss, as training reads once in
    `metrics.log_every` steps.
    """
    first_s: list[float] = []

    def run() -> Tensor:
        loss = step()
        if backend is not None:
            backend.step_boundary()
        return loss

    def turn() -> dict[str, Any]:
        number = steps
        if not first_s:
            began = time.perf_counter()
            clocks.read(run())
            first_s.append(time.perf_counter() - began)
            number = max(steps, warm_up_steps - 1)
        with clocks.measure() as seconds:
            for _ in range(number):
                last = run()
            loss = clocks.read(last)
        if not math.isfinite(loss):
            raise BackendError(f"the loss is {loss}, which is not finite; use another --precision")
        step_s = seconds["wall"] / number
        measured: dict[str, Any] = {**seconds, "step_s": step_s, "first_step_s": first_s[0], "loss": loss}
        measured["device_type"] = clocks.device.type  # `device` is a clock
        if backend is None:
            return {**measured, "maker_flops": None, "notes": ()}
        return {**measured, "maker_flops": backend.diagnostics.peak_flops(params), "notes": backend.notes()}

    return turn


def parts(step: Step, state: TrainState, backend: Backend) -> Turn:
    """Make a function that profiles one training step, and breaks its time down by kinds of operations."""
    read = clocks_of(backend).read

    def turn() -> dict[str, Any]:
        marked = ((state.gradients, "norm"), (state.optimizer, "step"), (state.data_parallel, "publish"))
        for owner, method in marked:
            setattr(owner, method, _marked(getattr(owner, method), UPDATE))
        try:
            with waits_marked():
                return break_down(lambda: read(step()), on_device=backend.device.type != "cpu")
        finally:
            for owner, method in marked:
                delattr(owner, method)

    return turn


@contextmanager
def waits_marked() -> Iterator[None]:
    """Mark waits for other ranks and the starts of shared-memory collectives in profiles, inside this context."""
    marks: list[torch.profiler.record_function] = []

    def mark(begins: bool) -> None:
        if begins:
            marks.append(torch.profiler.record_function(WAIT))
            marks[-1].__enter__()
        else:
            marks.pop().__exit__(None, None, None)

    start = Exchange.start
    note = WAIT_CLOCK.note
    Exchange.start = _marked(start, EXCHANGE)  # type: ignore[method-assign]
    WAIT_CLOCK.note = mark
    try:
        yield
    finally:
        Exchange.start = start  # type: ignore[method-assign]
        WAIT_CLOCK.note = note


def _marked(method: Callable[..., Any], mark: str) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(mark):
            return method(*args, **kwargs)

    return call
