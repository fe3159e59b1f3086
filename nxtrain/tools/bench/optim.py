"""Cost of an update under each rule, next to torch's fused AdamW on float32 parameters, in turns in one process.

The measure is the CPU time of this process, the steadiest figure on a shared machine. Results are medians over
rounds. Ratios are medians of the ratios inside each round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from statistics import median
from typing import Any

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
from nxtrain.parallel.precision import DTYPES, Precision, Update
from nxtrain.tools.bench import harness
from nxtrain.tools.bench.train import SHAPE
from nxtrain.train.build import build_meta

PEER = "torch.optim.AdamW(fused=True)"
WARMUP_ROUNDS = 2
BETAS = (0.9, 0.95)
EPS = 1e-8
WEIGHT_DECAY = 0.1
LR = 1e-3


@dataclass(frozen=True)
class Case:
    """Update rule, with the number types that it is measured with."""

    update: Update
    params: str  # types of parameters and running means
    state: str

    @property
    def name(self) -> str:
        """Name of the case, by the values of `[precision]`."""
        return self.update if self.state == "fp32" else f"{self.update}, bf16 state"


CASES = (
    Case("fp32", "fp32", "fp32"),
    Case("fp32_master", "bf16", "fp32"),
    Case("bf16_stochastic", "bf16", "fp32"),
    Case("bf16_stochastic", "bf16", "bf16"),
    Case("bf16_kahan", "bf16", "fp32"),
    Case("bf16_kahan", "bf16", "bf16"),
)


def bench_optim(*, layers: int, rounds: int, threads: int, as_json: bool) -> None:
    """Measure the cost of an update under each rule on some blocks of a model, and print the results."""
    if threads:
        torch.set_num_threads(threads)
    backend = open_backend("cpu")
    layout = layout_of(backend, layers)
    num_params = layout.table.num_params()
    grads = {name: torch.randn(spec.shape) * 1e-3 for name, spec in layout.table.items()}
    updates: dict[str, Callable[[], object]] = {PEER: _torchs(grads)}
    bytes_per_param = {PEER: 12.0}
    for case in CASES:
        updates[case.name], held = _ours(case, layout, backend, grads)
        bytes_per_param[case.name] = held / num_params
    sides = {name: partial(harness.cpu_s, update) for name, update in updates.items()}
    seconds = harness.take_turns(sides, rounds, warm_up=WARMUP_ROUNDS)
    result: dict[str, Any] = {"num_params": num_params, "threads": torch.get_num_threads(), "rounds": rounds}
    result["rules"] = summarize(seconds, num_params, bytes_per_param)
    harness.present(result, lambda: [_table(result)], as_json=as_json, of_machine=False)


def layout_of(backend: Backend, layers: int) -> Layout:
    """Parameters of a model with some blocks, on one rank."""
    family = find_family("llama")
    shape = family.config_type.model_validate({**SHAPE, "num_hidden_layers": layers, "max_position_embeddings": 128})
    mesh = Mesh.build(1, 0)
    return Layout(ParamTable.of(build_meta(Resolved(RunConfig(), family, shape), backend, mesh)), mesh)


def summarize(
    seconds: Mapping[str, Sequence[float]], num_params: int, bytes_per_param: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """Medians over rounds of each rule, compared with those of `PEER`."""
    rules = {}
    for name, turns in seconds.items():
        rules[name] = {
            "ns_per_param": median(turns) / num_params * 1e9,
            "ratio": harness.median_ratio(turns, seconds[PEER]),
            "bytes_per_param": bytes_per_param[name],
        }
    return rules


def _ours(case: Case, layout: Layout, backend: Backend, grads: Mapping[str, Tensor]) -> tuple[Callable[[], None], int]:
    """Function that runs an update, and the bytes of its parameters and optimizer state."""
    params, state = DTYPES[case.params], DTYPES[case.state]
    shards = {name: torch.randn(spec.shape).to(params) for name, spec in layout.table.items()}
    optimizer = AdamW(
        shards,
        layout,
        backend.kernels,
        backend.put,
        precision=Precision(params, torch.float32, torch.float32, case.update, state),
        seed=0,
        optim=OptimConfig(betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY),
    )
    lr, scale = backend.scalars(LR, 1.0)
    skip = backend.put(torch.zeros((), dtype=torch.bool))
    tensors = [*shards.values(), *chain.from_iterable(kind.values() for kind in optimizer.state.values())]
    return lambda: optimizer.step(grads, lr, scale, skip), sum(tensor.nbytes for tensor in tensors)


def _torchs(grads: Mapping[str, Tensor]) -> Callable[[], None]:
    parameters = [torch.nn.Parameter(torch.randn(grad.shape)) for grad in grads.values()]
    for parameter, grad in zip(parameters, grads.values(), strict=True):
        parameter.grad = grad
    optimizer = torch.optim.AdamW(parameters, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True)
    return lambda: optimizer.step() and None


def _table(result: Mapping[str, Any]) -> Table:
    rows = []
    for name, rule in result["rules"].items():
        figures = (f"{rule['ns_per_param']:.2f}", f"{rule['ratio']:.2f}", f"{rule['bytes_per_param']:.0f}")
        rows.append((name, *figures))
    heads = ("rule", "ns per parameter", "x torch fused", "bytes per parameter")
    caption = f"processor time of {result['threads']} threads, medians over {result['rounds']} rounds"
    return harness.table(f"one update of {result['num_params']:,} parameters", heads, rows, caption)
