"""Breakdown of one training step's time into kinds of operations, from torch's profiler.

The times of all kinds add up to the step's time. Each operation counts with its own time, without the time of nested
operations. Time in which no torch operation runs is a kind of its own, so that no time is hidden.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

MATMUL = "matrix products"
ATTENTION = "attention"
COPIES = "copies"
ELEMENTWISE = "element-wise"
OPTIMIZER = "optimizer"
LOSS = "loss"
COMMUNICATION = "communication"
WAITING = "waiting"
DISPATCH = "dispatch"
OUTSIDE = "outside torch"

KINDS = {
    MATMUL: "products with weights",
    ATTENTION: "scores, softmax, values, and their gradients",
    COPIES: "casts, layouts, concatenations and fills",
    ELEMENTWISE: "arithmetic, norms, gates, rotations and sums",
    OPTIMIZER: "norm of the gradient, update, and publication of parameters",
    LOSS: "cross entropy without its matrix products",
    COMMUNICATION: "starting collectives and transfers",
    WAITING: "waiting for other ranks, or for the device",
    DISPATCH: "views, allocation, autograd, and Python inside operations",
    OUTSIDE: "Python between operations",
}

STEP = "nxtrain.step"  # mark of the whole step in the profile
UPDATE = "nxtrain.optimizer"  # mark of the update
WAIT = "nxtrain.wait"  # mark of waits for other ranks
EXCHANGE = "nxtrain.exchange"  # mark of the start of communication with other ranks
PROFILES = 3  # profiles of a step, of which one counts

_COMMUNICATION = re.compile(r"^(nxtrain\.exchange|c10d::|gloo:|nccl:|_c10d_functional::|record_param_comms)")
_ATTENTION = re.compile(r"attention|flash", re.IGNORECASE)
_LOSS = re.compile(r"CrossEntropy|cross_entropy|log_softmax|LogSoftmax|nll_loss|NllLoss")
_BATCHED = re.compile(r"^aten::(bmm|baddbmm|_softmax.*|softmax)$")
"""Names of operations that only the attention of a Llama uses.

In a compiled block no function name surrounds these operations, so their own names must identify them.
"""
_MATMUL = re.compile(r"::(addmm|mm|mv|addmv|linear|matmul|dot|_scaled_mm)_?(backward)?$|mkl|gemm", re.IGNORECASE)
_COPIES = re.compile(r"^aten::(_?to_copy|copy_|clone|contiguous|cat|stack|fill_|zero_|index_select|embedding)$")
_VIEWS = re.compile(
    r"^aten::(view|_?unsafe_view|transpose|permute|expand|slice|select|as_strided|_?reshape.*|t|detach_?|empty.*|"
    r"unflatten|flatten|split.*|narrow|alias|resize_.*|unsqueeze|squeeze|chunk|unbind|to|lift_fresh|result_type|"
    r"item|_local_scalar_dense|zeros|ones|full|scalar_tensor|zeros_like|ones_like|empty_like|new_.*|is_nonzero|"
    r"set_|requires_grad_|numpy_T|mT|movedim|view_as|expand_as|_has_compatible_shallow_copy_type)$"
)
_LOOPS = re.compile(r"CompiledFxGraph|^CompiledFunction|^graph_\d+_|cpp_fused|triton_")  # operations of compiled graphs


def kind_of(chain: Sequence[str]) -> str:
    """Kind of an operation (one of `KINDS`), from its name and then the names of the operations around it, outwards."""
    name = chain[0]
    if name == STEP:
        return OUTSIDE
    if name == WAIT:
        return WAITING
    if any(_COMMUNICATION.search(one) for one in chain):
        return COMMUNICATION
    if _BATCHED.search(name) or any(_ATTENTION.search(one) for one in chain):
        return ATTENTION
    if _MATMUL.search(name):
        return MATMUL
    if UPDATE in chain:
        return OPTIMIZER
    if any(_LOSS.search(one) for one in chain):
        return LOSS
    if _COPIES.search(name):
        return COPIES
    if _LOOPS.search(name):
        return ELEMENTWISE
    if not name.startswith("aten::") or _VIEWS.search(name):
        return DISPATCH
    return ELEMENTWISE


def break_down(step: Callable[[], object], *, on_device: bool = False) -> dict[str, Any]:
    """Profile one training step and return its time by kind of operation.

    Args:
        on_device: Count the device's time of each operation, in place of the CPU's.

    Returns:
        `step_s`: seconds of the step by the wall clock. `sum_s`: sum over the kinds. `kinds`: seconds, number of
        operations and share of the sum for each kind.
    """
    activities = [ProfilerActivity.CPU]
    if on_device:
        activities = [*torch.profiler.supported_activities()]
    with profile(activities=activities):
        step()  # the first profile of a process sets up buffers
    # A process that loses its core between the clock and the mark has time that belongs to no kind. So the profile
    # counts whose sum is closest to the clock. The number of profiles is fixed, since all ranks take the same steps.
    profiles = [_profiled(step, activities, on_device=on_device) for _ in range(PROFILES)]
    _, step_s, kinds = min(profiles, key=lambda profiled: profiled[0])
    if on_device:
        idle_s = step_s - sum(kind["s"] for name, kind in kinds.items() if name not in (OUTSIDE, WAITING))
        kinds = {**kinds, OUTSIDE: {"s": 0.0, "calls": 0}, WAITING: {"s": max(0.0, idle_s), "calls": 0}}
    total = sum(kind["s"] for kind in kinds.values())
    return {
        "step_s": step_s,
        "sum_s": total,
        "kinds": {name: {**kind, "share": kind["s"] / total} for name, kind in kinds.items()},
    }


def _profiled(
    step: Callable[[], object], activities: Sequence[ProfilerActivity], *, on_device: bool
) -> tuple[float, float, dict[str, dict[str, float]]]:
    """Profile one step.

    Returns:
        Difference in seconds between the step's wall-clock time and the sum over the kinds; wall-clock time in seconds;
        seconds and number of operations of each kind.
    """
    with profile(activities=activities, acc_events=True) as profiled:
        began = time.perf_counter()
        with record_function(STEP):
            step()
        step_s = time.perf_counter() - began
    times_s: dict[str, list[float]] = {kind: [] for kind in KINDS}
    events: Sequence[Any] = profiled.events() or ()
    for event in events:
        chain = []
        caller = event
        while caller is not None:
            chain.append(caller.name)
            caller = caller.cpu_parent
        if on_device:
            # Kernels belong to the operation that launched them, and backward runs on a thread without the mark.
            times_s[kind_of([*chain, STEP])].append(event.self_device_time_total / 1e6)
        elif STEP in chain:
            times_s[kind_of(chain)].append(event.self_cpu_time_total / 1e6)
    kinds = {kind: {"s": sum(seconds), "calls": len(seconds)} for kind, seconds in times_s.items()}
    gap_s = abs(sum(kind["s"] for kind in kinds.values()) - step_s)
    return gap_s, step_s, kinds
