"""No attention of a long sequence makes a tensor with two dimensions of a sequence, on any eager backend.

Shapes of all results are recorded as torch dispatches them, forward and backward. Devices that are not here compute
with tensors that have no storage. `tests/xla/test_attention_memory.py` reads the graphs of PyTorch/XLA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from nxtrain.backends.cpu_kernels import CpuKernels
from nxtrain.backends.cuda import CudaKernels
from nxtrain.backends.flex_attention import block_mask
from nxtrain.backends.limits import LONGEST_SCORES
from nxtrain.backends.neuron.native_kernels import NeuronNativeKernels
from nxtrain.backends.torch_kernels import PlainKernels
from nxtrain.common.kernels import Kernels
from nxtrain.common.mesh import Mesh
from nxtrain.common.sequence_cut import ContextMethod, SequenceCut
from nxtrain.nn.attention import CausalAttention
from nxtrain.parallel.context_parallel import ContextParallel
from tests.support.contract_functions import Echo

LENGTH, HEADS, WIDTH = 4096, 2, 8
DOCUMENT = 1000
KERNELS: dict[str, Callable[[], Kernels]] = {
    "cpu": CpuKernels,
    "cuda": CudaKernels,
    "neuron-native": NeuronNativeKernels,
    "plain": PlainKernels,
}


class Shapes(TorchDispatchMode):
    """Recorder of results with two dimensions of a length or more."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.square: list[str] = []

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, Tensor) and sum(size >= self.length for size in x.shape) > 1:
                self.square.append(f"{func} {tuple(x.shape)}")
        return out


def starts_of(length: int) -> Tensor:
    places = torch.arange(length)
    return (places - places % DOCUMENT).unsqueeze(0)


def squares(kernels: Kernels, length: int, *, documents: bool, method: ContextMethod | None = None) -> list[str]:
    """Results of an attention, forward and backward, with two dimensions of the positions of a rank."""
    starts, own, context = starts_of(length), torch.arange(length), None
    if method is not None:
        context = ContextParallel(Mesh.build(2, 1, cp=2).cp, SequenceCut(length, 2, "zigzag"), method, Echo(), kernels)
        own = context.positions
    q = torch.randn(len(own), 1, HEADS, WIDTH, requires_grad=True)
    kv = torch.randn(len(own), 1, 1, WIDTH, requires_grad=True)
    given = starts[:, own] if documents else None
    shapes = Shapes(len(own))
    with shapes:
        CausalAttention(kernels, context)(q, kv, kv, given, own).sum().backward()
    return shapes.square


CASES = [
    (name, documents, method)
    for name in KERNELS
    for documents in (False, True)
    for method in (None, "gather", "ring")
    # torch chooses its own fused kernel on a GPU
    if (name, documents, method) != ("cuda", False, None)
]


@pytest.mark.parametrize(("name", "documents", "method"), CASES)
def test_no_result_has_two_dimensions_of_a_sequence(name: str, documents: bool, method: ContextMethod | None) -> None:
    kernels = KERNELS[name]()
    if name == "cpu":
        assert squares(kernels, LENGTH, documents=documents, method=method) == []
        return
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert squares(kernels, LENGTH, documents=documents, method=method) == []


@pytest.mark.parametrize("name", ["plain", "neuron-native"])
def test_a_short_sequence_has_its_scores_at_once(name: str) -> None:
    """Also shows that such a tensor is noticed."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert squares(KERNELS[name](), LONGEST_SCORES, documents=False)
        assert squares(KERNELS[name](), LONGEST_SCORES + 1, documents=False) == []


def test_the_block_mask_of_flex_attention_is_no_mask_of_positions() -> None:
    starts = starts_of(LENGTH)
    with Shapes(LENGTH // 2) as shapes:
        block_mask(starts)
    assert shapes.square == []


def test_long_sequences_get_the_attention_of_short_ones() -> None:
    generator, length = torch.Generator().manual_seed(1), LONGEST_SCORES + 3
    q, grad = (torch.randn(length, 1, 2, 8, generator=generator) for _ in range(2))
    k, v = (torch.randn(length, 1, 1, 8, generator=generator) for _ in range(2))
    results = []
    for kernels in (PlainKernels(), CpuKernels()):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out = kernels.attention(inputs[0], inputs[1], inputs[2])
        results.append([out, *torch.autograd.grad(out, inputs, grad)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
