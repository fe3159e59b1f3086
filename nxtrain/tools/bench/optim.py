"""Cost of an update under each rule, next to torch's fused AdamW on float32 parameters, in turns in one process.

What counts is the processor time of this process, the steadiest figure on a machine that others use too. What is quoted
is the median over rounds, and of ratios the median of the ratios inside each round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from nxtrain.backends import open_backend
from nxtrain.backends.base import Backend
from nxtrain.common.family import find_family
from nxtrain.common.mesh import Mesh
from nxtrain.common.process.document import write_document
from nxtrain.common.process.progress import Progress
from nxtrain.common.sharding import Layout, ParamTable
from nxtrain.config.check import Resolved
from nxtrain.config.schema import OptimConfig, RunConfig
from nxtrain.optim.adamw import AdamW
from nxtrain.parallel.precision import DTYPES, Precision, Update
from nxtrain.tools.bench.train import SHAPE
from nxtrain.tools.bench.turns import median_ratio
from nxtrain.train.build import build_meta

PEER = "torch.optim.AdamW(fused=True)"
WARMUP_ROUNDS = 2
BETAS = (0.9, 0.95)
EPS = 1e-8
WEIGHT_DECAY = 0.1
LR = 1e-3


@dataclass(frozen=True)
class Case:
    """A rule and the types that it is measured with.

    Args:
        update: The rule.
        params, state: Types of parameters and running means.
    """

    update: Update
    params: str
    state: str

    @property
    def name(self) -> str:
        """As in `[precision]`."""
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
    """Measure and print.

    Args:
        layers: Blocks of the model whose parameters are updated.
        rounds: Turns of each rule, after `WARMUP_ROUNDS`.
        threads: Number of CPU threads; 0: all cores.
        as_json: Print JSON instead of a table.
    """
    if threads:
        torch.set_num_threads(threads)
    backend = open_backend("cpu")
    layout = _layout(backend, layers)
    num_params = layout.table.num_params()
    grads = {name: torch.randn(spec.shape) * 1e-3 for name, spec in layout.table.items()}
    updates = {PEER: _torchs(grads)}
    bytes_per_param = {PEER: 12.0}
    names = [PEER, *(case.name for case in CASES)]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with Progress("making the states", (WARMUP_ROUNDS + rounds) * len(seconds)) as progress:
        for case in CASES:
            updates[case.name], held = _ours(case, layout, backend, grads)
            bytes_per_param[case.name] = held / num_params
        for done, (turn, name) in enumerate(product(range(WARMUP_ROUNDS + rounds), updates)):
            progress.show(done, f"round {turn} of {WARMUP_ROUNDS + rounds}: {name}")
            begin = time.process_time()
            updates[name]()
            if turn >= WARMUP_ROUNDS:
                seconds[name].append(time.process_time() - begin)
    result = {"num_params": num_params, "threads": torch.get_num_threads(), "rounds": rounds}
    rules = summarize(seconds, num_params, bytes_per_param)
    if as_json:
        write_document({**result, "rules": rules})
    else:
        Console().print(_table(rules, num_params, torch.get_num_threads(), rounds))


def summarize(
    seconds: Mapping[str, Sequence[float]], num_params: int, bytes_per_param: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """Medians over rounds.

    Args:
        seconds: Of each turn of each rule, `PEER` among them.
        num_params: Updated in one turn.
        bytes_per_param: Of parameters and state.
    """
    rules = {}
    for name, turns in seconds.items():
        rules[name] = {
            "ns_per_param": median(turns) / num_params * 1e9,
            "ratio": median_ratio(turns, seconds[PEER]),
            "bytes_per_param": bytes_per_param[name],
        }
    return rules


def _layout(backend: Backend, layers: int) -> Layout:
    family = find_family("llama")
    shape = family.config_type.model_validate({**SHAPE, "num_hidden_layers": layers, "max_position_embeddings": 128})
    mesh = Mesh.build(1, 0)
    return Layout(ParamTable.of(build_meta(Resolved(RunConfig(), family, shape), backend, mesh)), mesh)


def _ours(case: Case, layout: Layout, backend: Backend, grads: Mapping[str, Tensor]) -> tuple[Callable[[], None], int]:
    """An update, and the bytes of what it works on."""
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


def _table(rules: Mapping[str, Mapping[str, Any]], num_params: int, threads: int, rounds: int) -> Table:
    table = Table(title=f"one update of {num_params:,} parameters", title_style="bold")
    table.add_column("rule")
    for column in ("ns per parameter", "x torch fused", "bytes per parameter"):
        table.add_column(column, justify="right")
    for name, rule in rules.items():
        table.add_row(name, f"{rule['ns_per_param']:.2f}", f"{rule['ratio']:.2f}", f"{rule['bytes_per_param']:.0f}")
    table.caption = f"processor time of {threads} threads, medians over {rounds} rounds"
    return table
