"""Roundings that are left to a Trainium's hardware: of each updated tensor once, from float32, and of nothing else.

The hardware draws for every cast from float32 to bfloat16 that its program has. So the graph of an update must have one
such cast per rounded tensor, of the float32 result, and no arithmetic in bfloat16, which would round as well. XLA:CPU
rounds these casts to the nearest number, and the results show that it does so once.

A Trainium would add what no graph shows: that the runtime has the hardware round at random, by
`NEURON_RT_STOCHASTIC_ROUNDING_EN`; that the bits are right on average; and that neuronx-cc neither merges casts nor
adds any (`--auto-cast=none`).

Source: about-neuron/arch/neuron-features/rounding-modes.rst in https://github.com/aws-neuron/aws-neuron-sdk at 81ce03a.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.backends.neuron.backend import NeuronBackend
from nxtrain.config.check import Resolved
from nxtrain.launch.variables import ROUNDING
from nxtrain.train.step import train_step
from tests.support.models import changed, weights_of
from tests.support.neuron_runtime import Runtime
from tests.support.parity import LR, OPTIM, batches, layout, local_batch, start
from tests.support.xla_engine import run_devices


@dataclass(frozen=True)
class Update:
    """The first update of a run with accumulation."""

    text: str
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    state: dict[str, dict[str, Tensor]]


def updates(backend: Backend, cases: Sequence[tuple[Resolved, Mapping[str, Tensor]]]) -> list[Update]:
    """The update of each case, from its weights."""
    assert type(backend) is NeuronBackend
    return [_update(backend, *case) for case in cases]


def _update(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor]) -> Update:
    state = start(backend, resolved, weights)
    (batch,) = batches(resolved, 1)
    data = local_batch(state, batch, resolved.config.train.micro_batch)
    backend.step_boundary()
    before = _host(dict(state.model.named_parameters()))
    seen: dict[str, str] = {}

    def meet(graph: str, text: Callable[[], str]) -> None:
        seen.setdefault(graph, text())

    with Runtime(meet, runs=True):
        train_step(state, data, LR)
        backend.step_boundary()
    _, update = seen.values()  # after a micro-batch, which is the same each time
    kept = {kind: _host(tensors) for kind, tensors in state.optimizer.state.items()}
    return Update(update, before, _host(dict(state.model.named_parameters())), kept)


def _host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.detach().cpu() for name, x in tensors.items()}


PLAN = layout("gqa2", tp=1, micro=2, params="bf16", update="bf16_stochastic")
CASES: dict[str, Resolved] = {"fp32 state": PLAN, "bf16 state": changed(PLAN, precision={"state": "bf16"})}

INSTRUCTION = re.compile(r"\s*(ROOT )?%(\S+) = (\(.*?\)|\S+) ([a-z][a-z-]*)\((.*)")
OPERAND = re.compile(r"(?<!=)%([\w.-]+)")
MOVES = {
    "parameter",
    "tuple",
    "get-tuple-element",
    "reshape",
    "slice",
    "transpose",
    "concatenate",
    "broadcast",
    "constant",
}
"""Operations that compute nothing."""


class Instruction(NamedTuple):
    type: str
    op: str
    operands: list[str]
    is_root: bool

    @property
    def kind(self) -> str:
        return self.type.partition("[")[0]


def instructions(text: str) -> dict[str, Instruction]:
    """The instructions of a graph by name, those of called computations among them."""
    result, in_entry = {}, False
    for line in text.splitlines():
        in_entry = in_entry or line.startswith("ENTRY ")
        if match := INSTRUCTION.match(line):
            root, name, kind, op, rest = match.groups()
            assert name not in result
            result[name] = Instruction(kind, op, OPERAND.findall(rest), bool(root) and in_entry)
    return result


@pytest.fixture(scope="module")
def hardware(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Update]:
    """Updates whose casts the hardware is to round."""
    cases = [(plan, weights_of(plan)) for plan in CASES.values()]
    folder = tmp_path_factory.mktemp("hardware")
    (result,) = run_devices(1, updates, cases, folder=folder, neuron={ROUNDING: "1"})
    return dict(zip(CASES, result, strict=True))


def faults(update: Update, roundings: int) -> list[str]:
    """Roundings of an update beside its results, or instead of them, and casts that are too many or too few."""
    graph = instructions(update.text)
    casts = {name: item for name, item in graph.items() if item.op == "convert" and item.kind == "bf16"}
    (root,) = (node for node in graph.values() if node.is_root)
    result = [f"{len(casts)} casts to bf16 for {roundings} tensors"] if len(casts) != roundings else []
    result += [
        f"{name} casts {graph[item.operands[0]].kind}"
        for name, item in casts.items()
        if graph[item.operands[0]].kind != "f32"
    ]
    result += [f"{name} is not a result" for name in casts if name not in root.operands]
    narrow = {name: item for name, item in graph.items() if item.kind == "bf16" and item.op not in {*MOVES, "convert"}}
    result += [f"{name} is {item.op} in bf16" for name, item in narrow.items()]
    unknown = {node.kind for node in graph.values() if node.kind in {"f16", "f64"} or node.kind.startswith("f8")}
    result += [f"something is {kind}" for kind in unknown]
    drawn = {node.op for node in graph.values()} & {
        "xor",
        "rng",
        "rng-bit-generator",
        "bitcast-convert",
        "reduce-precision",
    }
    return result + [f"software rounds too: {op}" for op in sorted(drawn)]


@pytest.mark.parametrize("case", CASES)
def test_each_tensor_is_cast_once_and_its_arithmetic_is_in_float32(case: str, hardware: dict[str, Update]) -> None:
    update = hardware[case]
    kinds = 3 if case == "bf16 state" else 1  # the parameters, and both running means
    assert faults(update, kinds * len(update.before)) == []


def test_parameters_are_the_float32_update_rounded_once(hardware: dict[str, Update]) -> None:
    """To the nearest number, which XLA:CPU's cast takes: no entry is off by more than half the distance to the next.

    The update itself is rounded in float32, which shows where it nearly cancels the parameter.
    """
    update = hardware["fp32 state"]
    moved = 0
    for name, old in update.before.items():
        exact = stepped(old, update.state["exp_avg"][name], update.state["exp_avg_sq"][name])
        new = update.after[name]
        half = torch.exp2(torch.floor(torch.log2(exact.abs())) - 8)
        of_float32 = torch.finfo(torch.float32).eps * old.double().abs()
        assert bool(((new.double() - exact).abs() <= half * (1 + 1e-3) + of_float32).all()), name
        moved += int((new != old).sum())
    assert moved > 0.9 * sum(x.numel() for x in update.before.values())


def stepped(old: Tensor, mean: Tensor, mean_sq: Tensor) -> Tensor:
    """The first update of AdamW from its running means, in float64."""
    beta1, beta2 = OPTIM["betas"]
    decay = OPTIM["weight_decay"] if old.dim() > 1 else 0.0
    mean, mean_sq = mean.double() / (1 - beta1), mean_sq.double() / (1 - beta2)
    updated: Tensor = old.double() * (1 - LR * decay) - LR * mean / (mean_sq.sqrt() + OPTIM["eps"])
    return updated


def test_software_that_rounds_would_be_noticed(tmp_path: Path) -> None:
    ((update,),) = run_devices(1, updates, [(PLAN, weights_of(PLAN))], folder=tmp_path, neuron={ROUNDING: "0"})
    assert "software rounds too: xor" in faults(update, len(update.before))
