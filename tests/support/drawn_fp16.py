"""Runs in fp16 beside torch.amp.GradScaler and AdamW in one process, named and drawn, with steps that overflow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

import torch
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.backends.cpu import CpuBackend
from nxtrain.common.sharding import Layout
from nxtrain.common.vocab import IGNORE_INDEX
from nxtrain.config.check import Resolved
from nxtrain.parallel.loss import VocabHead
from nxtrain.train.build import build_mesh
from nxtrain.train.step import train_step
from tests.support.drawn import Drawn, draw
from tests.support.drawn_runs import first_weights
from tests.support.layouts import Degrees
from tests.support.models import changed, hf_model
from tests.support.parity import batches, gradient, local_batch, local_pair, reference, run_ours, start, table_of, whole

WORSE = 1.5
"""Most that our error may exceed transformers'."""


@dataclass(frozen=True)
class Distance:
    """Distances from float32 transformers, which starts from the same bf16 weights."""

    gradient: float
    losses: tuple[float, ...]


def distances(backend: Backend, drawn: Drawn) -> tuple[Distance, Distance]:
    """Ours, and that of transformers in bf16 with AdamW on a float32 copy of its weights."""
    weights = {name: weight.bfloat16().float() for name, weight in first_weights(drawn).items()}
    resolved, data = drawn.resolved, drawn.batches()
    exact = reference(resolved, drawn.steps, data=data, weights=weights)
    exact_grads = _gradient(drawn, weights, torch.float32)

    state = start(backend, resolved, weights)
    actual = gradient(state, local_pair(state, data[0], resolved.config.train.micro_batch))
    course = run_ours(backend, resolved, drawn.steps, weights, data)
    theirs = _mixed_losses(drawn, weights)
    scales = [math.sqrt((targets != IGNORE_INDEX).sum().item()) for _, targets in data]

    def of(losses: Sequence[float], grads: Mapping[str, Tensor]) -> Distance:
        differences = (abs(a - b) * scale for a, b, scale in zip(losses, exact.losses, scales, strict=True))
        return Distance(_relative(grads, exact_grads), tuple(differences))

    return (
        of(course.losses, whole([actual.shards], resolved)),
        of(theirs, _gradient(drawn, weights, torch.bfloat16)),
    )


def root_mean_square(numbers: Sequence[float]) -> float:
    """Root of the mean of the squares."""
    return math.sqrt(sum(x * x for x in numbers) / len(numbers))


def _relative(result: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    assert result.keys() == exact.keys()
    wrong = sum((result[name].double() - grad.double()).square().sum().item() for name, grad in exact.items())
    return math.sqrt(wrong / sum(grad.double().square().sum().item() for grad in exact.values()))


def _loss(model: torch.nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
    logits = model(input_ids=pair[0]).logits.double()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), pair[1].flatten(), ignore_index=IGNORE_INDEX)


def _gradient(drawn: Drawn, weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    model = hf_model(drawn.resolved, weights=weights).to(dtype)
    _loss(model, drawn.batches()[0]).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _mixed_losses(drawn: Drawn, weights: Mapping[str, Tensor]) -> list[float]:
    optim = drawn.resolved.config.optim
    model = hf_model(drawn.resolved, weights=weights).to(torch.bfloat16)
    masters = {name: torch.nn.Parameter(p.detach().float()) for name, p in model.named_parameters()}
    groups: dict[float, list[Tensor]] = {optim.weight_decay: [], 0.0: []}
    for master in masters.values():
        groups[optim.weight_decay if optim.decay_norms or master.dim() > 1 else 0.0].append(master)
    options = [{"params": params, "weight_decay": decay} for decay, params in groups.items() if params]
    optimizer = torch.optim.AdamW(options, lr=optim.lr, betas=optim.betas, eps=optim.eps)
    losses = []
    for pair in drawn.batches():
        model.zero_grad()
        loss = _loss(model, pair)
        loss.backward()
        losses.append(loss.item())
        for name, p in model.named_parameters():
            assert p.grad is not None
            masters[name].grad = p.grad.float()
        torch.nn.utils.clip_grad_norm_(masters.values(), optim.clip or math.inf)
        optimizer.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(masters[name])
    return losses


STEPS = 8
SCALE, EVERY = 2.0**21, 2
"""A first scale at which the gradients of these models overflow, and steps after which a scale grows within a run."""

MARGIN = 8.0
"""Ratio of scales between which sums in another order may overflow or not: parts of a sum exceed the whole."""

LOSS, NORM, CHANGE = 2e-3, 5e-3, 0.05
"""Largest differences: of a loss at equal weights; of a norm and of the largest change of a weight, relative."""

MOVED = 0.05
"""Largest distance between the final weights of two runs, relative to the distance that the reference went.

The first updates of AdamW move every weight by the learning rate, whatever the size of its gradient. Where rounding
decides the sign of a gradient, two right runs move apart. The loss is therefore compared at equal weights.
"""


@dataclass(frozen=True)
class Scaled:
    """A run in fp16."""

    losses: list[float]
    norms: list[float]
    scales: list[float]
    updates: list[float]
    change: list[float]
    masters: list[dict[str, Tensor]]


def empty_run() -> Scaled:
    """A run before its first step."""
    return Scaled([], [], [], [], [], [])


class Reference:
    """transformers' model in fp16 with float32 masters, on the micro-batches of all ranks, one after the other."""

    def __init__(self, resolved: Resolved) -> None:
        config = self._config = resolved.config
        self._resolved, self._model = resolved, hf_model(resolved).half()
        self._narrow = list(self._model.parameters())
        self._wide = [torch.nn.Parameter(p.detach().float()) for p in self._narrow]
        decaying = [p.dim() > 1 or config.optim.decay_norms for p in self._narrow]
        groups = [
            {
                "params": [p for p, item in zip(self._wide, decaying, strict=True) if item == decays],
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
        """Train."""
        run = empty_run()
        updates = 0
        for step, batch in enumerate(batches(self._resolved, STEPS)):
            losses = self._gradients(batch, self._scaler.get_scale())
            if skipped:
                self._follow(batch, skipped[step], f"step {step}")
            self._scaler.unscale_(self._optimizer)
            norm = torch.nn.utils.clip_grad_norm_(self._wide, self._config.optim.clip or float("inf"))
            before, taken = self._masters(), self._scaler.get_scale()
            self._scaler.step(self._optimizer)
            self._scaler.update()
            updates += self._scaler.get_scale() >= taken
            with torch.no_grad():
                for p, master in zip(self._narrow, self._wide, strict=True):
                    p.copy_(master)
            run.losses.append(sum(losses) / len(losses))
            run.norms.append(norm.item() if norm.isfinite() else float("inf"))
            run.scales.append(self._scaler.get_scale())
            run.updates.append(updates)
            run.change.append(max((after - before[name]).abs().max().item() for name, after in self._masters().items()))
            run.masters.append(before)
        run.masters.append(self._masters())
        return run

    def losses_at(self, masters: Sequence[Mapping[str, Tensor]]) -> list[float]:
        """Losses of the steps at given weights, rounded to fp16; the arithmetic is in float32."""
        model = hf_model(self._resolved)
        losses = []
        with torch.no_grad():
            for batch, weights in zip(batches(self._resolved, STEPS), masters, strict=False):
                for name, p in model.named_parameters():
                    p.copy_(weights[name].half())
                logits = model(input_ids=batch[:, :-1]).logits
                losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).item())
        return losses

    def _masters(self) -> dict[str, Tensor]:
        names = [name for name, _ in self._model.named_parameters()]
        return {name: p.detach().clone() for name, p in zip(names, self._wide, strict=True)}

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
    run = empty_run()
    for step, batch in enumerate(batches(resolved, STEPS)):
        heads = [module for module in state.model.modules() if isinstance(module, VocabHead)]
        for head in heads:
            is_broken = step == broken and state.mesh.rank == 1
            head.scale = (lambda: torch.tensor(float("inf"))) if is_broken else state.loss_scale.per_position
        masters = state.optimizer.state["master"]
        before = {name: master.clone() for name, master in masters.items()}
        result = train_step(
            state, local_batch(state, batch, resolved.config.train.micro_batch), resolved.config.optim.lr
        )
        norm = result.grad_norm.item()
        run.losses.append(result.loss.item())
        run.norms.append(norm if torch.tensor(norm).isfinite() else float("inf"))
        run.scales.append(state.loss_scale.state[0].item())
        run.updates.append(state.optimizer.num_updates[0].item())
        moved = [(master - before[name]).abs().flatten() for name, master in masters.items()]
        run.change.append(torch.cat(moved).max().item())  # a rank's part of a small tensor may be empty
        run.masters.append(before)
    run.masters.append({name: master.clone() for name, master in state.optimizer.state["master"].items()})
    return run


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


def differences(courses: Sequence[Scaled], resolved: Resolved, want: Scaled | None = None) -> str:
    """Hold all ranks against the reference; the largest differences in words."""
    first = courses[0]
    assert all((course.scales, course.updates) == (first.scales, first.updates) for course in courses), "ranks differ"
    skipped = [after == before for before, after in zip([0.0, *first.updates], first.updates, strict=False)]
    reference = Reference(resolved)
    want = want or reference.run(skipped)
    assert (first.scales, first.updates) == (want.scales, want.updates), (first.scales, want.scales)
    masters = [whole_masters([course.masters[step] for course in courses], resolved) for step in range(STEPS + 1)]
    exact = reference.losses_at(masters)
    loss = max(abs(a - b) for course in courses for a, b in zip(course.losses, exact, strict=True))
    norms = [(a, b) for course in courses for a, b in zip(course.norms, want.norms, strict=True)]
    assert all((a == float("inf")) == (b == float("inf")) for a, b in norms), norms
    norm = max((abs(a / b - 1) for a, b in norms if b != float("inf")), default=0.0)
    largest = max(max(course.change) for course in courses)
    change = abs(largest - max(want.change)) / max(want.change) if max(want.change) else largest
    moved = distance(masters[-1], want.masters[-1]) / max(distance(want.masters[0], want.masters[-1]), 1e-12)
    said = f"loss {loss:.1e}, norm {norm:.1e}, change {change:.1e}, moved {moved:.1e}, {sum(skipped)} skipped"
    assert loss <= LOSS and norm <= NORM and change <= CHANGE and moved <= MOVED, said
    return said


def whole_masters(shards: Sequence[Mapping[str, Tensor]], resolved: Resolved) -> dict[str, Tensor]:
    """Whole weights of the shards of all ranks, by global name."""
    weights: dict[str, Tensor] = {}
    for rank, held in enumerate(shards):
        mesh = build_mesh(resolved, len(shards), rank, len(shards))
        layout = Layout(table_of(resolved, mesh), mesh)
        for name, blocks in layout.items():
            spec = layout.table[name]
            for block in blocks:
                key = spec.global_name(name, block.segment)
                part = weights.setdefault(key, torch.full(spec.global_shape(block.segment), float("nan")))
                for dim, (offset, size) in enumerate(zip(block.offsets, block.sizes, strict=True)):
                    part = part.narrow(dim, offset, size)
                part.copy_(block.of(held[name]))
    return weights


def distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """L2 norm of the difference of two sets of weights."""
    return math.sqrt(sum((a[name] - b[name]).double().square().sum().item() for name in b))
