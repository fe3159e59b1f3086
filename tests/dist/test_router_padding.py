"""Losses of routers over rows with padding, which transformers leaves out by its attention mask."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from nxtrain.backends import open_backend
from nxtrain.backends.base import Backend
from nxtrain.common.vocab import END_BIT, IGNORE_INDEX
from nxtrain.config.check import Resolved
from nxtrain.data.loader import Batch, batch_of
from nxtrain.nn import mixture
from nxtrain.train.step import train_step
from nxtrain.train.trainer import on_device
from tests.support.models import MIXTURES, changed, hf_model, weights_of
from tests.support.parity import Gradient, gradient, layout, start
from tests.support.ranks import RankPool

LAYOUTS: list[dict[str, Any]] = [
    {},
    {"dp": 2},
    {"tp": 2},
    {"tp": 2, "sp": True},
    {"cp": 2, "cp_layout": "zigzag"},
    {"pp": 2},
    {"dp": 2, "ep": 2, "shard": "full"},
    {"tp": 2, "sp": True, "cp": 2, "dp": 1},
]


def padded(family: str, *, doc_mask: bool = True, **degrees: Any) -> Resolved:
    """A mixture whose routers' losses have as much of the gradient as the cross entropy, on packed rows."""
    config = {"num_experts_per_tok": 2, "router_aux_loss_coef": 5.0, "intermediate_size": 24}
    config |= {"num_local_experts": 5} if family == "mixtral" else {"num_experts": 4, "moe_intermediate_size": 11}
    if family == "mixtral" and degrees.get("ep"):
        config["num_local_experts"] = 4
    dp = degrees.get("dp", 1)
    run = layout("gqa2", **{"tp": 1, **degrees}, micro=4 // dp, family=family, config=config, moe_z_loss=0.1)
    return changed(run, data={"packing": "best_fit", "doc_mask": doc_mask})


def rows_of(resolved: Resolved, seed: int) -> NDArray[np.int64]:
    """One document in each row, and padding after it; one row is full."""
    rng, length = Random(seed), resolved.config.train.seq_len + 1
    rows = np.full((4, length), IGNORE_INDEX, np.int64)
    for row, size in zip(rows, (length, *(rng.randint(2, length - 1) for _ in range(3))), strict=True):
        row[:size] = [rng.randrange(resolved.model.vocab_size) for _ in range(size)]
        row[size - 1] |= END_BIT
    return rows


def share_of(resolved: Resolved, rows: NDArray[np.int64], dp: int, rank: int) -> Batch:
    data = resolved.config.data
    own = np.split(rows, dp)[rank]
    return batch_of(own, resolved.config.train.micro_batch, doc_mask=data.doc_mask)


def on_rank(backend: Backend, resolved: Resolved, weights: dict[str, Tensor], rows: NDArray[np.int64]) -> Gradient:
    state = start(backend, resolved, weights)
    dp = state.mesh.dp
    return gradient(state, on_device(state, share_of(resolved, rows, dp.size, dp.rank)))


def losses_on_rank(
    backend: Backend, resolved: Resolved, weights: dict[str, Tensor], rows: NDArray[np.int64]
) -> list[float]:
    state = start(backend, resolved, weights)
    dp = state.mesh.dp
    found = train_step(state, on_device(state, share_of(resolved, rows, dp.size, dp.rank)), 0.0)
    assert found.routing is not None
    return found.routing.tolist()


def reference(resolved: Resolved, weights: dict[str, Tensor], rows: NDArray[np.int64]) -> tuple[list[float], float]:
    """Both losses of transformers' routers, and the norm of the whole gradient, in float64."""
    batch = share_of(resolved, rows, 1, 0)
    assert batch.padding is not None
    arrays = (batch.inputs, batch.targets, batch.padding)
    inputs, targets, padding = (torch.from_numpy(array.reshape(4, -1)) for array in arrays)
    model = hf_model(resolved, weights=weights, attention="sdpa").double()
    found = model(input_ids=inputs, attention_mask=(~padding).long(), output_router_logits=True)
    cross_entropy = torch.nn.functional.cross_entropy(
        found.logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX
    )
    counted = ~padding.flatten()
    squares = torch.stack([logits[counted].logsumexp(-1).square() for logits in found.router_logits]).mean()
    mixture = resolved.dimensions.mixture
    assert mixture is not None
    aux_loss = found.aux_loss
    (cross_entropy + mixture.aux_loss_coef * aux_loss + resolved.config.model.moe_z_loss * squares).backward()
    norm = torch.stack([p.grad.square().sum() for p in model.parameters() if p.grad is not None]).sum().sqrt()
    return [aux_loss.item(), squares.item()], norm.item()


@pytest.mark.parametrize("index", range(len(LAYOUTS)))
def test_padding_has_no_part_in_the_losses_of_routers(ranks: RankPool, index: int) -> None:
    family = MIXTURES[index % 2]
    resolved = padded(family, **LAYOUTS[index])
    weights, rows = weights_of(resolved), rows_of(resolved, index)
    parallel = resolved.config.parallel
    world = parallel.tp * parallel.pp * max(1, parallel.dp) * parallel.cp
    losses, norm = reference(resolved, weights, rows)
    for measured in ranks.run(world, losses_on_rank, resolved, weights, rows):
        assert measured == pytest.approx(losses, rel=2e-6)
    found = ranks.run(world, on_rank, resolved, weights, rows)
    for one in found:
        assert one.norm == pytest.approx(norm, rel=1e-5)


def test_padding_without_masks_between_documents_is_left_out_too(ranks: RankPool) -> None:
    """Causal attention sees no padding from tokens before it."""
    resolved = padded("mixtral", doc_mask=False)
    weights, rows = weights_of(resolved), rows_of(resolved, 3)
    losses, norm = reference(resolved, weights, rows)
    (measured,) = ranks.run(1, losses_on_rank, resolved, weights, rows)
    assert measured == pytest.approx(losses, rel=2e-6)
    (found,) = ranks.run(1, on_rank, resolved, weights, rows)
    assert found.norm == pytest.approx(norm, rel=1e-5)


def defective(backend: Backend, resolved: Resolved, weights: dict[str, Tensor], rows: NDArray[np.int64]) -> list[float]:
    right = mixture._statistics

    def of_all(logits: Tensor, probabilities: Tensor, indices: Tensor, counted: Tensor | None) -> Tensor:
        return right(logits, probabilities, indices, None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixture, "_statistics", of_all)
        return losses_on_rank(backend, resolved, weights, rows)


def test_counted_padding_would_be_seen(ranks: RankPool) -> None:
    resolved = padded("qwen3_moe")
    weights, rows = weights_of(resolved), rows_of(resolved, 5)
    losses, _ = reference(resolved, weights, rows)
    (measured,) = ranks.run(1, defective, resolved, weights, rows)
    assert abs(measured[0] / losses[0] - 1) > 1e-3


def test_rows_of_one_stream_have_no_mask_of_padding() -> None:
    """So that a run without padding keeps its graph."""
    resolved = changed(padded("mixtral"), data={"packing": "concat"})
    state = start(open_backend("cpu"), resolved, weights_of(resolved))
    assert not state.has_padding
    batch = on_device(state, share_of(resolved, rows_of(resolved, 1), 1, 0))
    assert not batch.counted and len(batch.micro_batches[0]) == 3
