"""Runs in fp16 beside torch.amp.GradScaler and AdamW in one process, named and drawn, with steps that overflow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

import torch
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.backends.cpu import CpuBackend
from nxtrain.config.check import Resolved
from nxtrain.parallel.loss import VocabHead
from nxtrain.train.step import train_step
from tests.support.drawn import Degrees, draw
from tests.support.models import changed, hf_model
from tests.support.parity import batches, local_batch, start

STEPS = 8
SCALE, EVERY = 2.0**21, 2
"""A first scale at which the gradients of these models overflow, and steps after which a scale grows within a run."""

MARGIN = 8.0
"""Ratio of scales between which sums in another order may overflow or not: parts of a sum exceed the whole."""

LOSS, NORM, CHANGE = 2e-3, 5e-3, 0.05
"""Largest differences: of a loss, of a norm and of the largest change of a weight in parts of the reference's."""


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


class Reference:
    """transformers' model in fp16 with float32 masters, on the micro-batches of all ranks, one after the other.

    Args:
        resolved: Configuration in fp16.
    """

    def __init__(self, resolved: Resolved) -> None:
        config = self._config = resolved.config
        self._resolved, self._model = resolved, hf_model(resolved).half()
        self._narrow = list(self._model.parameters())
        self._wide = [torch.nn.Parameter(p.detach().float()) for p in self._narrow]
        decaying = [p.dim() > 1 or config.optim.decay_norms for p in self._narrow]
        groups = [
            {
                "params": [p for p, each in zip(self._wide, decaying, strict=True) if each == decays],
                "weight_decay": config.optim.weight_decay * decays,
            }
            for decays in (True, False)
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=config.optim.lr, betas=config.optim.betas, eps=config.optim.eps)
        precision = config.precision
        self._scaler = torch.amp.GradScaler(
            "cpu", init_scale=precision.loss_scale, growth_interval=precision.loss_scale_every
        )
        self._scaler.scale(torch.zeros(()))  # its state begins with the first use

    def run(self, skipped: Sequence[bool] = ()) -> Scaled:
        """Train.

        Args:
            skipped: Steps that another run skipped, which this run skips as well; empty: its own decisions. A step near
                the largest scale may overflow in one order of summation and not in another.

        Raises:
            AssertionError: A skipped step is far from an overflow, or another step overflows far below its scale.
        """
        found = Scaled([], [], [], [], [])
        updates = 0
        for step, batch in enumerate(batches(self._resolved, STEPS)):
            losses = self._gradients(batch, self._scaler.get_scale())
            if skipped:
                self._follow(batch, skipped[step], f"step {step}")
            self._scaler.unscale_(self._optimizer)
            norm = torch.nn.utils.clip_grad_norm_(self._wide, self._config.optim.clip or float("inf"))
            before, taken = [p.detach().clone() for p in self._wide], self._scaler.get_scale()
            self._scaler.step(self._optimizer)
            self._scaler.update()
            updates += self._scaler.get_scale() >= taken
            with torch.no_grad():
                for p, kept in zip(self._narrow, self._wide, strict=True):
                    p.copy_(kept)
            found.losses.append(sum(losses) / len(losses))
            found.norms.append(norm.item() if norm.isfinite() else float("inf"))
            found.scales.append(self._scaler.get_scale())
            found.updates.append(updates)
            found.change.append(max((a - b).abs().max().item() for a, b in zip(self._wide, before, strict=True)))
        return found

    def _gradients(self, batch: Tensor, scale: float) -> list[float]:
        """Losses of the micro-batches; the gradients of the masters are left scaled."""
        train, losses = self._config.train, []
        for p in self._wide:
            p.grad = torch.zeros_like(p)
        for micro in batch.split(train.micro_batch):
            self._model.zero_grad()
            logits = self._model(input_ids=micro[:, :-1]).logits.float()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), micro[:, 1:].flatten())
            (loss * scale).backward()
            for p, kept in zip(self._narrow, self._wide, strict=True):
                assert p.grad is not None and kept.grad is not None
                kept.grad += p.grad.float()
            losses.append(loss.item())
        for p in self._wide:
            assert p.grad is not None
            p.grad *= train.micro_batch * train.seq_len / batch[:, 1:].numel()
        return losses

    def _follow(self, batch: Tensor, skips: bool, step: str) -> None:
        """Take over a decision about a step."""
        scale = self._scaler.get_scale()
        if skips == (not self._is_finite):
            return
        if skips:
            self._gradients(batch, scale * MARGIN)
            assert not self._is_finite, (
                f"{step} was skipped, and overflows not even at {MARGIN} times its scale {scale}"
            )
            return
        self._gradients(batch, scale / MARGIN)
        assert self._is_finite, f"{step} was not skipped, and overflows at a {MARGIN}th of its scale {scale}"
        for p in self._wide:
            assert p.grad is not None
            p.grad *= MARGIN

    @property
    def _is_finite(self) -> bool:
        return all(bool(p.grad.isfinite().all()) for p in self._wide if p.grad is not None)


def run(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor], broken: int = -1) -> Scaled:
    """Our run on this rank; on rank 1 the gradient of a step `broken` is not finite."""
    if isinstance(backend, CpuBackend):
        backend.choose_transport(resolved.config.backend.cpu_transport)
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


def of_fp16(resolved: Resolved, scale: float = SCALE, every: int = EVERY) -> Resolved:
    """The same run in fp16, with a first scale.

    Stages add both gradients of a tied embedding in float32, transformers adds them in fp16. A sum may be too large for
    fp16 while neither part is, so that only transformers skips the step. Models of several stages are therefore untied.
    """
    if resolved.config.parallel.pp > 1:
        resolved = replace(resolved, model=resolved.model.model_copy(update={"tie_word_embeddings": False}))
    precision = {"params": "fp16", "update": "fp32_master", "loss_scale": scale, "loss_scale_every": every}
    return changed(resolved, precision=precision, optim={"clip": 0.5})


def draw_fp16(lane: str, seed: int, index: int, degrees: Degrees) -> Resolved:
    """One run of a layout in fp16, with a drawn scale."""
    rng = Random(f"scale/{lane}/{seed}/{index}")
    scale, every = 2.0 ** rng.choice((8, 16, 21, 24)), rng.choice((1, 2, 3))
    return of_fp16(draw(lane, seed, index, degrees).resolved, scale, every)


def differences(courses: Sequence[Scaled], resolved: Resolved) -> str:
    """Hold all ranks against the reference; the largest differences in words.

    Raises:
        AssertionError: Ranks decide differently, or a difference is beyond the tolerances.
    """
    first = courses[0]
    assert all((each.scales, each.updates) == (first.scales, first.updates) for each in courses), "ranks differ"
    skipped = [after == before for before, after in zip([0.0, *first.updates], first.updates, strict=False)]
    want = Reference(resolved).run(skipped)
    assert (first.scales, first.updates) == (want.scales, want.updates), (first.scales, want.scales)
    loss = max(abs(a - b) for each in courses for a, b in zip(each.losses, want.losses, strict=True))
    norms = [(a, b) for each in courses for a, b in zip(each.norms, want.norms, strict=True)]
    assert all((a == float("inf")) == (b == float("inf")) for a, b in norms), norms
    norm = max((abs(a / b - 1) for a, b in norms if b != float("inf")), default=0.0)
    moved = max(max(each.change) for each in courses)
    change = abs(moved - max(want.change)) / max(want.change) if max(want.change) else moved
    said = f"loss {loss:.1e}, norm {norm:.1e}, change {change:.1e}, {sum(skipped)} skipped"
    assert loss <= LOSS and norm <= NORM and change <= CHANGE, said
    return said
