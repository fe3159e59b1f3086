"""Benchmark of the optimizer step under each update rule, compared with torch's optimizer on float32 parameters.

All implementations run alternately in one process. The time is by the device's clock. On CPUs it is the CPU time of
this process, the steadiest figure on a shared machine. Results are medians over rounds. Ratios are medians of the
ratios inside each round.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import Any, Literal

import torch
from rich.table import Table
from torch import Tensor

from nxtrain.backends import open_backend
from nxtrain.backends.base import Backend
from nxtrain.common.family import find_family
from nxtrain.common.mesh import Mesh
from nxtrain.common.sharding import Layout, ParamTable
from nxtrain.config.check import Resolved
from nxtrain.config.schema import OptimConfig, RunConfig
from nxtrain.optim.adamw import AdamW
from nxtrain.optim.muon import Muon
from nxtrain.parallel.precision import DTYPES, Precision, Update
from nxtrain.parallel.whole_matrices import WholeMatrices
from nxtrain.tools.bench import harness
from nxtrain.tools.bench.clocks import Clocks, clocks_of
from nxtrain.tools.bench.train import CLOCKS, SHAPE, check_backend
from nxtrain.train.build import build_meta

PEER = "torch.optim.AdamW(fused=True)"
MUON_PEER = "torch.optim.Muon, AdamW(fused=True)"
WARMUP_ROUNDS = 2
QUEUED = 10
"""Optimizer steps per measurement on a device with a queue.

With so many steps, the host's launch and read are a small share of the time.
"""

BETAS = (0.9, 0.95)
EPS = 1e-8
WEIGHT_DECAY = 0.1
LR = 1e-3
ADAMW = OptimConfig(betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)


@dataclass(frozen=True)
class Case:
    """Update rule and dtypes of one measured optimizer."""

    update: Update
    params: str  # types of parameters and running means
    state: str
    products: Literal["fp32", "bf16"] = "fp32"  # of Newton-Schulz steps

    @property
    def name(self) -> str:
        """Name of the case in the results, made of values of `[precision]` and `optim.muon_precision`."""
        name = self.update if self.state == "fp32" else f"{self.update}, bf16 state"
        return name if self.products == "fp32" else f"{name}, bf16 products"


CASES = (
    Case("fp32", "fp32", "fp32"),
    Case("fp32_master", "bf16", "fp32"),
    Case("bf16_stochastic", "bf16", "fp32"),
    Case("bf16_stochastic", "bf16", "bf16"),
    Case("bf16_kahan", "bf16", "fp32"),
    Case("bf16_kahan", "bf16", "bf16"),
)


MUON_CASES = (*CASES, Case("fp32", "fp32", "fp32", "bf16"))


def bench_optim(  # 6 arguments: one for each option
    *,
    name: Literal["adamw", "muon"] = "adamw",
    layers: int,
    rounds: int,
    threads: int,
    as_json: bool,
    device: str = "cpu",
) -> None:
    """Measure the time of one optimizer step under each update rule, and print the results.

    Args:
        name: Optimizer to measure.
        layers: Number of the model's blocks.
        threads: Number of CPU threads; 0: torch's default.
        device: Name of the backend.
    """
    devices = check_backend(device, eager=True)
    if threads:
        torch.set_num_threads(threads)
    backend = open_backend(device)
    layout = layout_of(backend, layers)
    num_params = layout.table.num_params()
    grads = {name: backend.put(torch.randn(spec.shape) * 1e-3) for name, spec in layout.table.items()}
    optim = ADAMW.model_copy(update={"name": name})
    peer, cases = (PEER, CASES) if name == "adamw" else (MUON_PEER, MUON_CASES)
    updates: dict[str, Callable[[], object]] = {}
    bytes_per_param: dict[str, float] = {}
    hidden = hidden_names(layout) if name == "muon" else []
    updates[peer] = _torchs(grads, hidden)
    num_hidden = sum(grads[matrix].numel() for matrix in hidden)
    bytes_per_param[peer] = 12.0 - 4.0 * num_hidden / num_params
    for case in cases:
        updates[case.name], held = _ours(case, layout, backend, grads, optim)
        bytes_per_param[case.name] = held / num_params
    clocks = clocks_of(backend)
    sides = {side: timed(update, clocks, backend) for side, update in updates.items()}
    seconds = harness.take_turns(sides, rounds, warm_up=WARMUP_ROUNDS)
    rules = summarize(seconds, num_params, bytes_per_param, peer)
    rows = []
    for rule, turns in seconds.items():
        rows.append(harness.row(rule, "ns/parameter", [turn / num_params * 1e9 for turn in turns]))
    result: dict[str, Any] = {
        "machine": harness.machine(),
        "num_params": num_params,
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "backend": device,
        "devices": devices,
        "clock": "device" if clocks.has_events else "cpu",
        "rows": rows,
        "ratios": {rule: figures["ratio"] for rule, figures in rules.items()},
        "rules": rules,
    }
    harness.present(result, lambda: [_table(result, peer)], as_json=as_json, of_machine=False)
    backend.close()


def timed(update: Callable[[], object], clocks: Clocks, backend: Backend) -> Callable[[], float]:
    """Make a function that measures the seconds of one optimizer step.

    The clock is the device's, or else the CPU time of this process.
    """
    if not clocks.has_events:
        return lambda: harness.cpu_s(update)
    (one,) = backend.scalars(1.0)

    def turn() -> float:
        with clocks.measure() as seconds:
            for _ in range(QUEUED):
                update()
            clocks.read(one)
        return seconds["device"] / QUEUED

    return turn


def hidden_names(layout: Layout) -> list[str]:
    """Names of the weight matrices inside the model's blocks, which Muon updates."""
    return [name for name, spec in layout.table.items() if ".layers." in name and len(spec.shape) > 1]


def layout_of(backend: Backend, layers: int) -> Layout:
    """Layout of a Llama model's parameters with `layers` blocks, on one rank."""
    family = find_family("llama")
    shape = family.config_type.model_validate({**SHAPE, "num_hidden_layers": layers, "max_position_embeddings": 128})
    mesh = Mesh.build(1, 0)
    return Layout(ParamTable.of(build_meta(Resolved(RunConfig(), family, shape), backend, mesh)), mesh)


def summarize(
    seconds: Mapping[str, Sequence[float]], num_params: int, bytes_per_param: Mapping[str, float], peer: str = PEER
) -> dict[str, dict[str, float]]:
    """Median time of each update rule, and its ratio to the reference optimizer `peer`."""
    rules = {}
    for name, turns in seconds.items():
        rules[name] = {
            "ns_per_param": median(turns) / num_params * 1e9,
            "ratio": harness.median_ratio(turns, seconds[peer]),
            "bytes_per_param": bytes_per_param[name],
        }
    return rules


def _ours(
    case: Case, layout: Layout, backend: Backend, grads: Mapping[str, Tensor], optim: OptimConfig = ADAMW
) -> tuple[Callable[[], None], int]:
    """Make a function that runs one optimizer step of nxtrain.

    Returns:
        The function, and the bytes of its parameters and optimizer state.
    """
    params, state = DTYPES[case.params], DTYPES[case.state]
    shards = {name: backend.put(torch.randn(spec.shape).to(params)) for name, spec in layout.table.items()}
    precision = Precision(params, torch.float32, torch.float32, case.update, state)
    where = shards, layout, backend.kernels, backend.put
    optimizer = AdamW(*where, precision=precision, seed=0, optim=optim)
    if optim.name == "muon":
        optim = optim.model_copy(update={"muon_precision": case.products})
        hidden = {name: layout.table[name] for name in hidden_names(layout)}
        matrices = WholeMatrices(hidden, layout.mesh, 1, backend.collectives, backend.put)
        optimizer = Muon(*where, matrices, precision=precision, seed=0, optim=optim)
    lr, scale = backend.scalars(LR, 1.0)
    skip = backend.put(torch.zeros((), dtype=torch.bool))
    tensors = [*shards.values(), *chain.from_iterable(kind.values() for kind in optimizer.state.values())]
    return lambda: optimizer.step(grads, lr, scale, skip), sum(tensor.nbytes for tensor in tensors)


def _torchs(grads: Mapping[str, Tensor], hidden: Collection[str] = ()) -> Callable[[], None]:
    """Make a function that runs one step of torch's AdamW, with torch's Muon for the matrices named in `hidden`."""
    matrices, others = [], []
    for name, grad in grads.items():
        parameter = torch.nn.Parameter(torch.randn(grad.shape).to(grad.device))
        parameter.grad = grad
        if name in hidden:
            matrices.append(parameter)
        else:
            others.append(parameter)
    adamw = torch.optim.AdamW(others, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True)
    optimizers: list[torch.optim.Optimizer] = [adamw]
    if matrices:
        optimizers.append(torch.optim.Muon(matrices, lr=LR, weight_decay=WEIGHT_DECAY))

    def update() -> None:
        for optimizer in optimizers:
            optimizer.step()

    return update


def _table(result: Mapping[str, Any], peer: str) -> Table:
    rows = []
    for name, rule in result["rules"].items():
        figures = (f"{rule['ns_per_param']:.2f}", f"{rule['ratio']:.2f}", f"{rule['bytes_per_param']:.0f}")
        rows.append((name, *figures))
    heads = ("rule", "ns per parameter", f"x {peer.partition('(')[0]}", "bytes per parameter")
    clock = CLOCKS[result["clock"]]
    if result["clock"] == "cpu":
        clock += f" of {result['threads']} threads"
    caption = f"{clock}, medians over {result['rounds']} rounds"
    return harness.table(f"one update of {result['num_params']:,} parameters", heads, rows, caption)
