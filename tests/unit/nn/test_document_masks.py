"""Documents that share a row compute what each computes alone: logits, losses and gradients."""

from __future__ import annotations

import math
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from nxtrain.backends.cpu import CpuBackend
from nxtrain.backends.cpu_kernels import CpuKernels
from nxtrain.backends.torch_kernels import FusedKernels, PlainKernels
from nxtrain.common.kernels import Kernels
from nxtrain.common.mesh import Mesh
from nxtrain.common.vocab import END_BIT, ID_MASK, IGNORE_INDEX
from nxtrain.nn.rope import Rope, positions_of
from tests.support.corpora import END, SEQ_LEN, drawn_batch, spans
from tests.support.models import SHAPES, our_model, plan, weights_of

TOLERANCE = 1e-5
KERNELS: dict[str, Kernels] = {
    "cpu": CpuKernels(),
    "fused": FusedKernels(),
    "plain": PlainKernels(),
}


@given(st.integers(0, 1 << 32))
def test_starts_and_targets_are_those_of_the_documents(seed: int) -> None:
    rows, batch = drawn_batch(Random(seed), 50, 3)
    assert batch.starts is not None
    for number, row in enumerate(rows):
        starts = [begin for begin, end in spans(row) for _ in range(begin, end)]
        assert batch.starts[0, number].tolist() == starts
        ids = [token if token == IGNORE_INDEX else token & ID_MASK for token in row]
        assert batch.inputs[0, number].tolist() == [END if token == IGNORE_INDEX else token for token in ids[:-1]]
        last = {end - 1 for _, end in spans(row) if end < SEQ_LEN or row[SEQ_LEN - 1] & END_BIT}
        targets = [IGNORE_INDEX if position in last else ids[position + 1] for position in range(SEQ_LEN)]
        assert batch.targets[0, number].tolist() == targets
    assert batch.num_tokens == int((batch.targets != IGNORE_INDEX).sum())


@pytest.fixture(scope="module")
def models() -> dict[tuple[str, str], nn.Module]:
    backend = CpuBackend()
    results = {}
    for shape in ("mha", "gqa2", "llama3-rope"):
        resolved = plan(shape, train={"seq_len": SEQ_LEN})
        for name, kernels in KERNELS.items():
            backend.kernels = kernels
            results[shape, name] = our_model(resolved, backend, Mesh(1, 0), weights_of(resolved))
    backend.close()
    return results


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("kernels", KERNELS)
@settings(max_examples=8)
@given(st.integers(0, 1 << 32), st.sampled_from(["mha", "gqa2", "llama3-rope"]))
def test_packed_documents_are_those_alone(
    models: dict[tuple[str, str], nn.Module], kernels: str, seed: int, shape: str
) -> None:
    assert shape in SHAPES
    model, rng = models[shape, kernels], Random(seed)
    rows, batch = drawn_batch(rng, 128, rng.choice((1, 2, 3)))
    assert batch.starts is not None
    inputs, targets, starts = (torch.from_numpy(x[0]) for x in (batch.inputs, batch.targets, batch.starts))
    logits = model.logits(inputs, starts)  # type: ignore[operator]
    packed = model.loss(inputs, targets, starts)  # type: ignore[operator]
    packed_grads = gradients(model, packed)
    alone = torch.zeros(())
    for number, row in enumerate(rows):
        for begin, end in spans(row):
            document = inputs[number : number + 1, begin:end]
            expected = model.logits(document)  # type: ignore[operator]
            torch.testing.assert_close(logits[number : number + 1, begin:end], expected, rtol=0, atol=TOLERANCE)
            alone = alone + model.loss(document, targets[number : number + 1, begin:end])  # type: ignore[operator]
    assert float(packed.detach()) == pytest.approx(float(alone.detach()), rel=TOLERANCE)
    for name, expected in gradients(model, alone).items():
        scale = max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(packed_grads[name], expected, rtol=0, atol=TOLERANCE * scale, msg=name)


@pytest.mark.parametrize("kernels", KERNELS)
def test_positions_begin_at_0_in_each_document(kernels: str) -> None:
    """Scores depend on distances alone, so that no loss shows the positions themselves."""
    rows, batch = drawn_batch(Random(5), 128, 3)
    assert batch.starts is not None
    rope = Rope(SEQ_LEN, 8, 10000.0, None, KERNELS[kernels])
    for name, table in rope.host_buffers().items():
        rope.register_buffer(name, table, persistent=False)
    x = torch.randn(SEQ_LEN, 3, 6, 8, generator=torch.Generator().manual_seed(1))
    for heads in (x, x[:, :, 1:3]):
        packed = rope(heads, positions_of(torch.from_numpy(batch.starts[0])))
        for number, row in enumerate(rows):
            for begin, end in spans(row):
                alone = rope(heads[begin:end, number : number + 1])
                torch.testing.assert_close(packed[begin:end, number : number + 1], alone, rtol=0, atol=1e-6)


def test_attention_is_given_these_positions(models: dict[tuple[str, str], nn.Module]) -> None:
    model = models["gqa2", "plain"]
    _, batch = drawn_batch(Random(5), 128, 2)
    assert batch.starts is not None
    inputs, starts = torch.from_numpy(batch.inputs[0]), torch.from_numpy(batch.starts[0])
    seen = []
    rope = next(module for module in model.modules() if isinstance(module, Rope))
    with rope.register_forward_pre_hook(lambda _, args, options: seen.append(options["positions"]), with_kwargs=True):
        model.logits(inputs, starts)  # type: ignore[operator]
    assert len(seen) == 2
    for positions in seen:
        assert torch.equal(positions, torch.arange(SEQ_LEN)[:, None] - starts.t())


def test_without_masks_documents_see_each_other(models: dict[tuple[str, str], nn.Module]) -> None:
    _, batch = drawn_batch(Random(3), 128, 2)
    assert batch.starts is not None
    model, inputs = models["gqa2", "cpu"], torch.from_numpy(batch.inputs[0])
    masked = model.logits(inputs, torch.from_numpy(batch.starts[0]))  # type: ignore[operator]
    assert float((masked - model.logits(inputs)).abs().max()) > 100 * TOLERANCE  # type: ignore[operator]
    assert not math.isnan(float(masked.sum()))
