"""Recomputation on one rank: not a bit of the result changes, and what is kept for the backward pass is as counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nxtrain.backends.base import Backend
from nxtrain.backends.cpu import CpuBackend
from nxtrain.backends.cpu_kernels import CpuKernels
from nxtrain.backends.limits import CPU_BLOCK as BLOCK
from nxtrain.backends.limits import LONG_SEQUENCE
from nxtrain.backends.torch_kernels import PlainKernels
from nxtrain.common.kernels import Kernels
from nxtrain.common.mesh import Mesh
from nxtrain.config.check import Resolved
from nxtrain.parallel import chunks
from nxtrain.parallel.precision import DTYPES
from nxtrain.train.build import build_model
from tests.support.models import our_model, plan, tokens, weights_of
from tests.support.parity import Gradient, layout, rank_gradient, relative_errors

POLICIES = ("none", "selective", "full")


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> CpuBackend:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return CpuBackend()


class Drifting(CpuKernels):
    """Attention that is not the same when it is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = 0

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._calls += 1
        return super().attention(q * (1 + self._calls / 128), k, v)


class Keeping(CpuKernels):
    def recompute(self, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        return function(*inputs)


def gradients(backend: Backend, params: str, accumulation: int) -> dict[str, Gradient]:
    plans = {p: layout("gqa2", tp=1, micro=4 // accumulation, params=params, remat=p) for p in POLICIES}
    return {policy: rank_gradient(backend, resolved, weights_of(resolved)) for policy, resolved in plans.items()}


def is_same(a: Gradient, b: Gradient) -> bool:
    return (a.loss, a.norm) == (b.loss, b.norm) and all(
        torch.equal(a.shards[name], b.shards[name]) for name in b.shards
    )


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("params", ["fp32", "bf16"])
@pytest.mark.parametrize("kernels", [CpuKernels(), PlainKernels()], ids=["cpu", "plain"])
def test_recomputed_gradients_are_equal_bit_for_bit(
    backend: CpuBackend, kernels: Kernels, params: str, accumulation: int
) -> None:
    backend.kernels = kernels
    result = gradients(backend, params, accumulation)
    assert is_same(result["selective"], result["none"])
    assert is_same(result["full"], result["none"])


def test_an_attention_that_differs_when_computed_again_would_be_noticed(backend: CpuBackend) -> None:
    results = {}
    for policy in POLICIES:
        backend.kernels = Drifting()
        resolved = layout("gqa2", tp=1, remat=policy)
        results[policy] = rank_gradient(backend, resolved, weights_of(resolved))
    assert results["none"].loss == results["selective"].loss == results["full"].loss
    assert not is_same(results["selective"], results["none"])
    assert not is_same(results["full"], results["none"])


def resolve(params: str, remat: str, seq_len: int, **config: Any) -> Resolved:
    return plan(
        "gqa2",
        train={"seq_len": seq_len, "remat": remat},
        precision={"params": params, "update": "fp32" if params == "fp32" else "fp32_master"},
        model={"config": {"max_position_embeddings": seq_len, **config}},
    )


def kept_bytes(model: nn.Module, rows: Tensor) -> int:
    """Bytes that a forward pass keeps for the backward pass, parameters not counted."""
    storages: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model.loss(rows[:, :-1], rows[:, 1:])  # type: ignore[operator]
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert loss.requires_grad
    return sum(size for start, size in storages.items() if start not in parameters)


def expected_bytes(resolved: Resolved, batch: int) -> int:
    """The same by counting, for one tensor parallel rank; attention keeps its probabilities."""
    run = resolved.config
    model: dict[str, int] = resolved.model.model_dump()
    length, size, hidden = run.train.seq_len, DTYPES[run.precision.params].itemsize, model["hidden_size"]
    heads, num_tokens = model["num_attention_heads"], length * batch
    head_dim = hidden // heads
    kv = model["num_key_value_heads"] * head_dim
    # Token ids; the last norm's input and its factor per row; the head's gradients, which it finds in the forward pass.
    ends = 8 * (length + 1) * batch + num_tokens * (hidden * size + 4)
    ends += num_tokens * hidden * size + model["vocab_size"] * hidden * size
    # The input of each half and its normed form; q with k, the whole projection behind v, what attention gives; gate
    # with up and their product; the norms' factors per row.
    inner = 4 * hidden + (hidden + kv) + (hidden + 2 * kv) + hidden + 3 * model["intermediate_size"]
    block = num_tokens * (inner * size + 2 * 4)
    rope = 2 * length * head_dim // 2 * 4
    probabilities = batch * heads * sum(BLOCK * end for end in range(BLOCK, length + 1, BLOCK)) * size
    layers = model["num_hidden_layers"]
    return {
        "none": ends + rope + layers * (block + probabilities),
        "selective": ends + rope + layers * block,
        "full": ends + layers * num_tokens * hidden * size,
    }[run.train.remat]


@pytest.mark.parametrize(("params", "seq_len"), [("fp32", 512), ("bf16", 1024)])
@pytest.mark.parametrize("remat", POLICIES)
def test_a_forward_pass_keeps_what_its_policy_says(backend: CpuBackend, remat: str, params: str, seq_len: int) -> None:
    resolved = resolve(params, remat, seq_len, num_hidden_layers=3)
    model = build_model(resolved, backend, Mesh.build(1, 0), init="draw")
    assert kept_bytes(model, tokens(resolved, 1)) == expected_bytes(resolved, 1)


def test_kernels_that_recompute_nothing_would_be_noticed(backend: CpuBackend) -> None:
    backend.kernels = Keeping()
    resolved = resolve("fp32", "full", 512)
    model = build_model(resolved, backend, Mesh.build(1, 0), init="draw")
    assert kept_bytes(model, tokens(resolved, 1)) == expected_bytes(resolve("fp32", "none", 512), 1)


def test_long_is_what_the_documentation_says() -> None:
    assert LONG_SEQUENCE == 8192


@pytest.mark.parametrize(("seq_len", "num_matrices"), [(LONG_SEQUENCE - BLOCK, 3), (LONG_SEQUENCE, 0)])
def test_selective_drops_the_feed_forward_of_long_sequences_only(
    backend: CpuBackend, seq_len: int, num_matrices: int
) -> None:
    """Two widths of the feed-forward tell what is kept of it: gate, up and their product, or nothing."""
    kept = []
    for width in (16, 48):
        small = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": width, "num_hidden_layers": 1}
        resolved = resolve("fp32", "selective", seq_len, **small)
        model = build_model(resolved, backend, Mesh.build(1, 0), init="draw")
        kept.append(kept_bytes(model, tokens(resolved, 1)))
    assert kept[1] - kept[0] == num_matrices * (48 - 16) * seq_len * 4


def test_a_recomputed_feed_forward_changes_no_bit(backend: CpuBackend) -> None:
    small = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "num_hidden_layers": 1}
    grads = []
    for remat in POLICIES[:2]:
        resolved = resolve("fp32", remat, LONG_SEQUENCE, **small)
        model = build_model(resolved, backend, Mesh.build(1, 0), init="draw")
        rows = tokens(resolved, 1)
        model.loss(rows[:, :-1], rows[:, 1:]).backward()  # type: ignore[operator]
        grads.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])  # type: ignore[arg-type]


def feed_forward_gradients(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, longest: int, params: str, rows: int = 2, **model: Any
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a model whose feed-forwards take at most some positions at a time."""
    monkeypatch.setattr("nxtrain.nn.remat.LONG_SEQUENCE", longest)
    resolved = plan(
        "gqa2",
        train={"seq_len": LENGTH, "remat": "selective"},
        precision={"params": params, "update": "fp32" if params == "fp32" else "fp32_master"},
        model=model,
    )
    built = our_model(resolved, backend, Mesh.build(1, 0), weights_of(resolved))
    given = tokens(resolved, rows)
    loss = built.loss(given[:, :-1], given[:, 1:])  # type: ignore[operator]
    loss.backward()
    grads = {name: p.grad for name, p in built.named_parameters() if p.grad is not None}
    return loss.item(), grads


LENGTH = 61
"""Tokens of a row, a prime."""


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("longest", [1, 7, 31, 60])
@pytest.mark.parametrize("kernels", [CpuKernels(), PlainKernels()], ids=["cpu", "plain"])
def test_chunks_of_a_feed_forward_have_the_result_of_the_whole(
    backend: CpuBackend, monkeypatch: pytest.MonkeyPatch, kernels: Kernels, longest: int, fused: bool
) -> None:
    backend.kernels = kernels
    want = feed_forward_gradients(backend, monkeypatch, LENGTH, "fp32", fused_gate_up=fused)
    actual = feed_forward_gradients(backend, monkeypatch, longest, "fp32", fused_gate_up=fused)
    assert actual[0] == pytest.approx(want[0], rel=1e-6)
    assert max(relative_errors(actual[1], want[1]).values()) < 1e-6


def narrow_sums(params: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(param) for param in params]


@pytest.mark.parametrize("sums", [chunks._sums, narrow_sums], ids=["float32", "bfloat16"])
def test_sums_over_chunks_are_as_precise_as_one_product(
    backend: CpuBackend, monkeypatch: pytest.MonkeyPatch, sums: Callable[[Sequence[Tensor]], list[Tensor]]
) -> None:
    """Gradients in bfloat16, compared with float32: sums in bfloat16 would lose more than the product rounds."""
    monkeypatch.setattr(chunks, "_sums", sums)
    _, exact = feed_forward_gradients(backend, monkeypatch, LENGTH, "fp32")
    errors = {}
    for longest in (LENGTH, 2):
        _, grads = feed_forward_gradients(backend, monkeypatch, longest, "bf16")
        of_mlp = [error for name, error in relative_errors(grads, exact).items() if ".mlp." in name]
        errors[longest] = sum(of_mlp) / len(of_mlp)
    assert (errors[2] < 1.02 * errors[LENGTH]) == (sums is not narrow_sums), errors


def test_policies_leave_names_and_evaluation_alone(backend: CpuBackend) -> None:
    weights = weights_of(plan("gqa2"))
    results = []
    for remat in POLICIES:
        resolved = plan("gqa2", train={"remat": remat})
        model = our_model(resolved, backend, Mesh.build(1, 0), weights)
        with torch.no_grad():
            logits = model.logits(tokens(resolved, 1)[:, :-1])  # type: ignore[operator]
        results.append(({name: tuple(p.shape) for name, p in model.named_parameters()}, logits))
    for (names, logits), (next_names, next_logits) in pairwise(results):
        assert names == next_names
        assert torch.equal(logits, next_logits)
