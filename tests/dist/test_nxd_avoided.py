"""Defects of NeuronX Distributed that runs with its layers stay clear of: shown in its own code, then avoided."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.common.errors import BackendError
from nxtrain.common.mesh import Mesh
from nxtrain.common.sharding import Init
from nxtrain.common.vocab import IGNORE_INDEX
from nxtrain.config.check import Resolved
from nxtrain.parallel.native import NativeLayers
from nxtrain.parallel.regions import TensorParallel
from nxtrain.train.build import build_meta
from tests.support.models import random, weights_of
from tests.support.parity import batches, gradient, layout, local_batch, start
from tests.support.ranks import RankPool

pytestmark = pytest.mark.nxd

S, B, D, V = 4, 2, 8, 16


def nxd_layers(backend: Backend, dtype: torch.dtype, *, sp: bool = False) -> Mesh:
    """Make NxD's groups over all ranks, by asking for its layers."""
    mesh = Mesh.build(backend.world, backend.rank, tp=backend.world)
    parallel = TensorParallel(mesh.tp, backend.collectives, backend.kernels, dtype, sp)
    backend.binding.layers(NativeLayers(parallel), mesh, dtype)
    return mesh


def sequence_dimensions(backend: Backend) -> tuple[list[tuple[int, ...]], list[int]]:
    """Output shapes of NxD's embedding for (B, S) tokens at each sequence dimension, and our model's dimensions."""
    from neuronx_distributed.parallel_layers.layers import ParallelEmbedding

    nxd_layers(backend, torch.float32)
    tokens = torch.arange(S * B).remainder(V).reshape(B, S)
    shapes = []
    for dimension in (0, 1):
        theirs = ParallelEmbedding(
            num_embeddings=V, embedding_dim=D, sequence_parallel_enabled=True, sequence_dimension=dimension
        )
        shapes.append(tuple(theirs(tokens).shape))
    run = layout("gqa2", tp=backend.world, sp=True)
    ours = build_meta(run, backend, Mesh.build(backend.world, backend.rank, tp=backend.world))
    actual = [vars(module)["sequence_dimension"] for module in ours.modules() if hasattr(module, "sequence_dimension")]
    return shapes, actual


def test_nxd_4_5_only_dimension_0_is_ever_cut(nxd_ranks: RankPool) -> None:
    for shapes, ours in nxd_ranks.run(2, sequence_dimensions):
        assert shapes == [(S // 2, B, D), (B, S, D)]  # the second is neither summed nor cut
        assert ours
        assert set(ours) == {0}


def losses(backend: Backend) -> tuple[Tensor, float, float, float]:
    """NxD's loss of one ignored target, how much it changed the logits, ours, and how much ours changed its input."""
    from neuronx_distributed.parallel_layers.loss_functions import parallel_cross_entropy

    mesh = nxd_layers(backend, torch.float32)
    logits = random(1, 1, V, seed=1).chunk(backend.world, dim=-1)[backend.rank].clone()
    before, ignored = logits.clone(), torch.full((1, 1), IGNORE_INDEX)
    theirs = parallel_cross_entropy(vocab_parallel_logits=logits, target=ignored)
    native = NativeLayers(TensorParallel(mesh.tp, backend.collectives, backend.kernels, torch.float32))
    head = backend.binding.layers(native, mesh, torch.float32).head(V, D, Init())
    for name, value in head.host_buffers().items():  # type: ignore[attr-defined]
        head.register_buffer(name, value, persistent=False)  # type: ignore[attr-defined]
    torch.nn.init.normal_(head.weight)
    hidden = random(1, 1, D)
    kept = hidden.clone()
    ours = float(head.loss(hidden, ignored))
    return theirs, float((logits - before).abs().max()), ours, float((hidden - kept).abs().max())


def test_nxd_4_8_the_head_is_ours(nxd_ranks: RankPool) -> None:
    for theirs, changed, ours, ours_changed in nxd_ranks.run(2, losses):
        assert theirs.abs().min() > 0.1
        assert changed > 0.1
        assert (ours, ours_changed) == (0.0, 0.0)


def norm_errors(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor]) -> tuple[float, float]:
    """Largest relative error of our norm and of NxD's, over multiples of a gradient rounded to bfloat16."""
    from neuronx_distributed.parallel_layers.grads import get_grad_norm

    state = start(backend, resolved, weights)
    (batch,) = batches(resolved, 1)
    shards = gradient(state, local_batch(state, batch, resolved.config.train.micro_batch)).shards
    errors = []
    for factor in (1.0, 1.1, 1.2, 1.3, 1.4, 1.5):
        rounded = {name: (factor * grad.float()).bfloat16() for name, grad in shards.items()}
        for name, parameter in state.model.named_parameters():
            parameter.grad = rounded[name]
        exact = sum(float(grad.double().square().sum()) for grad in rounded.values()) ** 0.5
        actual = (state.gradients.norm(rounded), get_grad_norm(parameters=list(state.model.parameters())))
        errors.append([abs(float(norm) / exact - 1.0) for norm in actual])
    ours, theirs = (max(column) for column in zip(*errors, strict=True))
    return ours, theirs


def test_nxd_4_9_the_norm_is_ours_and_summed_in_float32(nxd_ranks: RankPool) -> None:
    resolved = layout("gqa2", tp=1, params="bf16")
    ((ours, theirs),) = nxd_ranks.run(1, norm_errors, resolved, weights_of(resolved))
    assert ours < 1e-6
    assert theirs > 1e-3


def half_types(backend: Backend) -> tuple[str, str]:
    """Output type of NxD's embedding for float16, and the error of ours."""
    from neuronx_distributed.parallel_layers.layers import ParallelEmbedding

    nxd_layers(backend, torch.float32)
    theirs = ParallelEmbedding(num_embeddings=V, embedding_dim=D, dtype=torch.float16)
    actual = theirs(torch.zeros(B, S, dtype=torch.int64)).dtype
    try:
        nxd_layers(backend, torch.float16)
    except BackendError as error:
        return str(actual), str(error)
    return str(actual), ""


def test_nxd_4_10_types_that_the_embedding_turns_into_another_are_refused(nxd_ranks: RankPool) -> None:
    for result, refusal in nxd_ranks.run(2, half_types):
        assert result == "torch.bfloat16"
        assert "torch.float16" in refusal
