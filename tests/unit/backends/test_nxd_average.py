"""Operands of NeuronX Distributed's average over the data parallel ranks, by a stand-in for its package."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nxtrain.backends.neuron.nxd.binding import NxdBinding
from nxtrain.common.distributed.collectives import Done, Pending
from nxtrain.common.mesh import Mesh

DP = Mesh.build(4, 0, tp=2).dp
PACKAGE = "neuronx_distributed"


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[list[Tensor]]:
    """The lists of gradients that NxD was asked to average, which halves them."""
    calls: list[list[Tensor]] = []

    def bucket_allreduce_gradients(grads_list: list[Tensor]) -> None:
        calls.append([grad.clone() for grad in grads_list])
        for grad in grads_list:
            grad.mul_(0.5)

    layers: Any = ModuleType(f"{PACKAGE}.parallel_layers")
    parts: dict[str, dict[str, Any]] = {"comm": {"all_reduce": None}, "mappings": {}}
    parts["grads"] = {"bucket_allreduce_gradients": bucket_allreduce_gradients}
    monkeypatch.setitem(sys.modules, PACKAGE, ModuleType(PACKAGE))
    monkeypatch.setitem(sys.modules, layers.__name__, layers)
    for name, members in parts.items():
        module = ModuleType(f"{layers.__name__}.{name}")
        vars(module).update(members)
        vars(layers)[name] = module
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("nxtrain.backends.neuron.nxd.binding.partial", lambda *_, **__: None)
    return calls


class _Comm(SimpleNamespace):
    """Collectives of our own; they average gradients that NxD cannot sum."""

    def start_all_reduce_bucket(self, *call: Any, **options: Any) -> Pending[list[Tensor]]:
        self.call = (*call, options)
        return Done([])


@pytest.mark.parametrize("reduce", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("params", [torch.float32, torch.bfloat16], ids=str)
def test_it_averages_fresh_gradients_in_the_type_of_the_reduction(
    given: list[list[Tensor]], params: torch.dtype, reduce: torch.dtype
) -> None:
    binding = NxdBinding(torch.device("cpu"))
    binding._sums_over_dp = True
    grads = [torch.rand(4, 6, generator=torch.Generator().manual_seed(1)).to(params), torch.ones(6, dtype=params)]
    grads[0] = grads[0].t()  # no gradient of ours is, but NxD works in place
    kept = [grad.clone() for grad in grads]
    actual = binding.start_average(grads, DP, reduce, _Comm()).wait()  # type: ignore[arg-type]
    assert [(grad.dtype, grad.is_contiguous()) for grad in actual] == [(reduce, True)] * 2
    for ours, want, got in zip(grads, kept, actual, strict=True):
        assert torch.equal(ours, want)
        assert torch.equal(got, want.to(reduce) * 0.5)
    ((first, second),) = given
    assert torch.equal(first, kept[0].to(reduce)) and torch.equal(second, kept[1].to(reduce))


@pytest.mark.parametrize("reduce", [torch.float32, torch.bfloat16], ids=str)
def test_what_it_would_sum_over_other_ranks_goes_through_our_own_collectives_in_that_type(
    given: list[list[Tensor]], reduce: torch.dtype
) -> None:
    binding, comm, grads = NxdBinding(torch.device("cpu")), _Comm(), [torch.ones(3)]
    binding.start_average(grads, DP, reduce, comm)  # type: ignore[arg-type]
    assert comm.call == (grads, DP, reduce, {"scale": 0.5})
    assert given == []
