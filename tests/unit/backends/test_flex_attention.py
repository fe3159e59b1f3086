"""FlexAttention computes attention inside of documents from a block mask that the device builds alone.

Torch's eager FlexAttention ignores the blocks and masks all scores, so that the blocks are compared on their own.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from nxtrain.backends.flex_attention import BLOCK, block_mask, failure, flex_attention
from nxtrain.common.kernels import KeyRanges
from tests.support.contract_kernels import exact_attention
from tests.support.contract_ranges import drawn_starts

LENGTHS = (1, 127, 128, 129, 300, 1000)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile.*"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # torch's compiler looks at it (torch 2.9)
]


def misplaced(mask: Any, first: Tensor) -> list[str]:
    """Blocks of a mask that are missing, needless, twice there, or full although a key is hidden."""
    batch, length = first.shape
    places = torch.arange(length)
    seen = (places <= places[:, None]) & (places >= first[:, :, None])
    problems = []
    for row in range(batch):
        for block in range(-(-length // BLOCK)):
            queries = slice(block * BLOCK, (block + 1) * BLOCK)
            partial = mask.kv_indices[row, 0, block, : mask.kv_num_blocks[row, 0, block]].tolist()
            full = mask.full_kv_indices[row, 0, block, : mask.full_kv_num_blocks[row, 0, block]].tolist()
            needed = {
                number
                for number in range(-(-length // BLOCK))
                if seen[row, queries, number * BLOCK : (number + 1) * BLOCK].any()
            }
            if sorted(partial + full) != sorted(needed):
                problems.append(f"row {row}, block {block}: {partial} and {full}, not {needed}")
            hidden = [n for n in full if not seen[row, queries, n * BLOCK : (n + 1) * BLOCK].all()]
            before = [n for n in partial if n != block]
            whole = [n for n in before if seen[row, queries, n * BLOCK : (n + 1) * BLOCK].all()]
            if hidden or whole:
                problems.append(f"row {row}, block {block}: {hidden} are not full, {whole} are")
    return problems


@pytest.fixture
def needs_backward() -> None:
    """Skip a test where CPUs have no backward pass; tests/device holds GPUs, which have one, to the same formula."""
    if not has_backward():
        pytest.skip(f"FlexAttention of torch {torch.__version__} has no backward pass on CPUs; runs with torch 2.9")


def has_backward() -> bool:
    """True if FlexAttention has a backward pass on CPUs, which torch 2.15 refuses."""
    x = torch.ones(1, 1, 1, 16, requires_grad=True)
    try:
        flex_attention(x, x, x, torch.zeros(1, 1, dtype=torch.int64))
    except NotImplementedError:
        return False
    return True


@pytest.mark.parametrize("length", LENGTHS)
def test_blocks_are_those_with_a_key_that_a_query_sees(length: int) -> None:
    rng = Random(length)
    for window in (None, 1, 100, 300):
        starts = drawn_starts(rng, 3, length)
        first = KeyRanges.of(starts, torch.arange(length), window).first
        assert misplaced(block_mask(first), first) == []
        if length > 2 * BLOCK and window != 1:
            assert misplaced(block_mask((first - BLOCK).clamp(min=0)), first), "blocks too many are noticed"
            later = torch.minimum(first + BLOCK, torch.arange(length))
            assert misplaced(block_mask(later), first), "blocks too few are noticed"


@pytest.mark.usefixtures("needs_backward")
@pytest.mark.parametrize("window", [None, 100])
def test_documents_get_the_attention_of_the_formula_and_its_gradients(window: int | None) -> None:
    torch._dynamo.reset()
    rng, generator = Random(3), torch.Generator().manual_seed(3)
    for length, kv_heads in ((129, 2), (300, 4)):
        starts = drawn_starts(rng, 2, length)
        first = KeyRanges.of(starts, torch.arange(length), window).first
        shapes = [(length, 2, heads, 16) for heads in (4, kv_heads, kv_heads, 4)]
        q, k, v, grad = (torch.randn(shape, generator=generator) for shape in shapes)
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        out = flex_attention(q, k, v, first)
        exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
        wanted = exact_attention(exact[0], exact[1], exact[2], first)
        torch.testing.assert_close(out.double(), wanted, rtol=0, atol=1e-5)
        ours = torch.autograd.grad(out, (q, k, v), grad)
        theirs = torch.autograd.grad(wanted, exact, grad.double())
        for actual, expected in zip(ours, theirs, strict=True):
            torch.testing.assert_close(actual.double(), expected, rtol=0, atol=2e-5)


def test_one_graph_without_a_read_of_the_host_serves_all_documents_of_a_shape() -> None:
    """`fullgraph` refuses a graph that ends for a read of a value."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    attend = torch.compile(flex_attention, backend=counter, dynamic=False, fullgraph=True)
    rng = Random(4)
    q = torch.randn(200, 2, 2, 16, requires_grad=has_backward())
    for _ in range(3):
        starts = drawn_starts(rng, 2, 200)
        out = attend(q, q, q, starts)
        torch.testing.assert_close(out, exact_attention(q, q, q, starts), rtol=0, atol=1e-5)
        if out.requires_grad:
            out.sum().backward()
    assert counter.frame_count == 1
    graph = counter.graphs[0]
    assert any("flex_attention" in str(node.target) for node in graph.graph.nodes)


def test_a_failure_is_a_reason_in_one_line() -> None:
    def broken(*_: Tensor) -> Tensor:
        raise RuntimeError("no compiler\nsecond line")

    assert failure(broken, torch.device("cpu"), torch.float32, 16) == "RuntimeError: no compiler"


def one_document(q: Tensor, k: Tensor, v: Tensor, first: Tensor) -> Tensor:
    return flex_attention(q, k, v, torch.zeros_like(first))


def shifted_documents(q: Tensor, k: Tensor, v: Tensor, first: Tensor) -> Tensor:
    return flex_attention(q, k, v, first.div(BLOCK, rounding_mode="floor") * BLOCK)


def keys_without_gradient(q: Tensor, k: Tensor, v: Tensor, first: Tensor) -> Tensor:
    return flex_attention(q, 0.5 * (k + k.detach()), v, first)


def not_a_number(q: Tensor, k: Tensor, v: Tensor, first: Tensor) -> Tensor:
    return flex_attention(q, k, v, first) * float("nan")


@pytest.mark.usefixtures("needs_backward")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trial_compares_output_and_gradients_with_the_formula(dtype: torch.dtype) -> None:
    device = torch.device("cpu")
    assert failure(flex_attention, device, dtype, 16) == ""
    for attend in (one_document, shifted_documents, keys_without_gradient, not_a_number):
        assert "its numbers are off by" in failure(attend, device, dtype, 16), attend.__name__
