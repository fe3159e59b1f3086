"""A Neuron backend with the NKI Library of SDK 2.29 takes its blockwise experts, in one graph for every routing."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.backends.expert_choice import ExpertShape
from nxtrain.backends.neuron import sdk
from nxtrain.backends.neuron.sdk import SdkVersion
from nxtrain.parallel.dispatch import static_dispatch
from nxtrain.parallel.expert_products import ExpertMatrices
from tests.support import nki_blockwise
from tests.support.contract_experts import exact_mixture
from tests.support.xla_engine import run_devices

TOKENS, SIZE, WIDTH, EXPERTS, K = 40, 512, 64, 4, 2
TOLERANCE = 2e-2


def operands(seed: int) -> tuple[list[Tensor], Tensor]:
    """Tokens, weights and matrices, and the experts of each token: the first ones only, or all."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(TOKENS, SIZE), (EXPERTS * 2 * WIDTH, SIZE), (SIZE, EXPERTS * WIDTH)]
    x, gate_up, down = (torch.randn(shape, generator=generator).to(torch.bfloat16) * 0.1 for shape in shapes)
    scores = torch.rand(TOKENS, EXPERTS, generator=generator)
    if seed == 0:
        scores[:, K:] = -1.0
    weights, indices = scores.topk(K)
    return [x, weights.abs().bfloat16().float(), gate_up, down], indices


def computed(backend: Backend) -> tuple[str, set[str], list[int], list[list[Tensor]]]:
    """Announcement, hashes of the graphs, cores of each call, and outputs and gradients of two routings."""
    import torch_xla

    nki_blockwise.install()
    vars(sdk)["detect"] = lambda: SdkVersion(2, 29)
    backend.choose_experts("auto", ExpertShape(TOKENS, SIZE, WIDTH, "bf16"))
    hashes, results = set(), []
    for seed in range(2):
        tensors, indices = operands(seed)
        inputs = [backend.put(x).requires_grad_() for x in tensors]
        matrices = ExpertMatrices(inputs[2], inputs[3], EXPERTS)
        chosen = backend.put(indices)
        backend.step_boundary()
        out = static_dispatch(inputs[0], inputs[1], chosen, matrices, EXPERTS, kernel=backend.kernels.blockwise)
        out.float().square().sum().backward()
        found = [out.detach(), *(x.grad for x in inputs if x.grad is not None)]
        hashes.add(str(torch_xla._XLAC._get_graph_hash(found)))
        backend.step_boundary()
        results.append([x.cpu() for x in found])
    cores = [*nki_blockwise.forward.cores, *nki_blockwise.backward.cores]
    return backend.notes()[0], hashes, cores, results


def test_experts_go_through_the_kernels_of_the_library(tmp_path: Path) -> None:
    ((note, hashes, cores, results),) = run_devices(1, computed, folder=tmp_path, neuron={}, instance="trn2.48xlarge")
    assert note == "blockwise experts: by kernels of the NKI Library, Neuron SDK 2.29"
    assert len(hashes) == 1, "no graph depends on a routing"
    assert cores == [2] * 4
    for seed, found in enumerate(results):
        tensors, indices = operands(seed)
        exact = [x.double().requires_grad_() for x in tensors]
        wanted = exact_mixture(exact[0], exact[1], indices, exact[2], exact[3], EXPERTS)
        wanted.square().sum().backward()
        for ours, theirs in zip(found, [wanted, *(x.grad for x in exact)], strict=True):
            assert theirs is not None
            assert float((ours.double() - theirs.detach()).norm() / theirs.detach().norm()) < TOLERANCE
