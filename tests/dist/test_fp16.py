"""Training in fp16 against torch.amp.GradScaler and AdamW in one process, with steps that overflow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.config.check import Resolved
from nxtrain.parallel.loss import VocabHead
from nxtrain.train.step import train_step
from tests.support.drawn import Degrees, draw
from tests.support.models import changed, hf_model, weights_of
from tests.support.parity import batches, layout, local_batch, start
from tests.support.ranks import RankPool

STEPS = 8
SCALE, EVERY = 2.0**21, 2
"""A first scale at which the gradients of these models overflow, and steps after which a scale grows within a run."""


@dataclass(frozen=True)
class Scaled:
    """A run in fp16.

    Args:
        losses, norms: Of each step; a norm that is not finite is infinite.
        scales: After each step.
        updates: Updates that were not skipped, after each step.
        change: Largest change of a float32 weight, of each step.
    """

    losses: list[float]
    norms: list[float]
    scales: list[float]
    updates: list[float]
    change: list[float]


def reference(resolved: Resolved) -> Scaled:
    """transformers' model in fp16 with float32 masters, on the micro-batches of all ranks, one after the other."""
    model, config = hf_model(resolved).half(), resolved.config
    narrow = list(model.parameters())
    decaying = [p.dim() > 1 or config.optim.decay_norms for p in narrow]
    wide = [torch.nn.Parameter(p.detach().float()) for p in narrow]
    groups = [
        {
            "params": [p for p, each in zip(wide, decaying, strict=True) if each == decays],
            "weight_decay": config.optim.weight_decay * decays,
        }
        for decays in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.optim.lr, betas=config.optim.betas, eps=config.optim.eps)
    scaler = torch.amp.GradScaler("cpu", init_scale=config.precision.loss_scale, growth_interval=EVERY)
    rows, positions = config.train.micro_batch, config.train.micro_batch * config.train.seq_len
    found = Scaled([], [], [], [], [])
    updates = 0
    for batch in batches(resolved, STEPS):
        losses = []
        for p in wide:
            p.grad = torch.zeros_like(p)
        for micro in batch.split(rows):
            model.zero_grad()
            logits = model(input_ids=micro[:, :-1]).logits.float()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), micro[:, 1:].flatten())
            scaler.scale(loss).backward()
            for p, kept in zip(narrow, wide, strict=True):
                assert p.grad is not None and kept.grad is not None
                kept.grad += p.grad.float()
            losses.append(loss.item())
        for p in wide:
            assert p.grad is not None
            p.grad *= positions / batch[:, 1:].numel()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(wide, config.optim.clip)
        before, taken = [p.detach().clone() for p in wide], scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        updates += scaler.get_scale() >= taken
        with torch.no_grad():
            for p, kept in zip(narrow, wide, strict=True):
                p.copy_(kept)
        found.losses.append(sum(losses) / len(losses))
        found.norms.append(norm.item() if norm.isfinite() else float("inf"))
        found.scales.append(scaler.get_scale())
        found.updates.append(updates)
        found.change.append(max((a - b).abs().max().item() for a, b in zip(wide, before, strict=True)))
    return found


def run(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor], broken: int = -1) -> Scaled:
    """Our run on this rank; on rank 1 the gradient of a step `broken` is not finite."""
    state = start(backend, resolved, weights)
    assert state.loss_scale is not None
    found = Scaled([], [], [], [], [])
    for step, batch in enumerate(batches(resolved, STEPS)):
        heads = [module for module in state.model.modules() if isinstance(module, VocabHead)]
        for head in heads:
            is_broken = step == broken and state.mesh.rank == 1
            head.scale = (lambda: torch.tensor(float("inf"))) if is_broken else state.loss_scale.per_position
        masters = state.optimizer.state["master"].values()
        before = [master.clone() for master in masters]
        result = train_step(
            state, local_batch(state, batch, resolved.config.train.micro_batch), resolved.config.optim.lr
        )
        norm = result.grad_norm.item()
        found.losses.append(result.loss.item())
        found.norms.append(norm if torch.tensor(norm).isfinite() else float("inf"))
        found.scales.append(state.loss_scale.state[0].item())
        found.updates.append(state.optimizer.num_updates[0].item())
        moved = [(a - b).abs().flatten() for a, b in zip(masters, before, strict=True)]
        found.change.append(torch.cat(moved).max().item())  # a rank's part of a small tensor may be empty
    return found


CUTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "tp2": {"tp": 2, "sequence_parallel": True},
    "dp2": {"dp": 2},
    "zero1": {"dp": 2, "tp": 2, "shard": "zero1"},
    "full": {"dp": 2, "shard": "full"},
    "hybrid": {"dp": 4, "shard": "hybrid"},
    "pp2": {"pp": 2},
    "zero bubble": {"pp": 2, "schedule": "zero_bubble"},
}


def drawn(index: int, cut: Mapping[str, Any]) -> Resolved:
    """A drawn shape in fp16 on a layout, whose first scales overflow.

    Stages add both gradients of a tied embedding in float32, transformers adds them in fp16. A sum may be too large for
    fp16 while neither part is, so that only transformers skips the step. Models of several stages are therefore untied.
    """
    resolved = draw("fp16", 7, index, Degrees(**cut)).resolved
    if "pp" in cut:
        resolved = replace(resolved, model=resolved.model.model_copy(update={"tie_word_embeddings": False}))
    precision = {"params": "fp16", "update": "fp32_master", "loss_scale": SCALE, "loss_scale_every": EVERY}
    # Steps that are large beside rounding in fp16.
    return changed(resolved, precision=precision, optim={"lr": 1e-2, "eps": 1e-5, "clip": 0.5})


@pytest.mark.parametrize(("index", "cut"), [*enumerate(CUTS.values())], ids=CUTS)
def test_drawn_shapes_train_as_with_torchs_scaler(ranks: RankPool, index: int, cut: dict[str, Any]) -> None:
    resolved = drawn(index, cut)
    want = reference(resolved)
    world = Degrees(**cut).world
    courses = ranks.run(world, run, resolved, weights_of(resolved))
    assert 0 < want.updates[-1] < STEPS, "some steps overflow, and some do not"
    for found in courses:
        assert (found.scales, found.updates) == (want.scales, want.updates)
        assert found.losses == pytest.approx(want.losses, abs=2e-3)
        assert found.norms == pytest.approx(want.norms, rel=5e-3)
        assert [change > 0 for change in found.change] == [norm < float("inf") for norm in want.norms]
    assert max(max(found.change) for found in courses) == pytest.approx(max(want.change), rel=0.05)


@pytest.mark.parametrize("cut", [CUTS["dp2"], CUTS["full"], {"tp": 2}, {"dp": 2, "shard": "zero1"}], ids=str)
def test_an_overflow_of_one_rank_skips_the_step_on_all(ranks: RankPool, cut: dict[str, Any]) -> None:
    resolved = layout("odd", tp=cut.get("tp", 1), dp=cut.get("dp", 1), micro=1, shard=cut.get("shard", "none"))
    types = {"params": "fp16", "update": "fp32_master", "loss_scale": 8.0, "loss_scale_every": 100}
    resolved = changed(resolved, precision=types)
    for found in ranks.run(2, run, resolved, weights_of(resolved), 2):
        assert found.scales == [8.0, 8.0, *[4.0] * 6]
        assert found.updates == [1, 2, 2, 3, 4, 5, 6, 7]
        assert [change > 0 for change in found.change] == [True, True, False, *[True] * 5]
