"""Weight decay, betas and momentum that change: drawn updates next to torch's, resumes, skips, and defects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import _muon as torch_muon

from nxtrain.backends.cpu_kernels import CpuKernels
from nxtrain.backends.torch_kernels import FusedKernels, PlainKernels, bias_correction
from nxtrain.common.kernels import Kernels, MeanDecay
from nxtrain.config.schema import OptimConfig
from nxtrain.optim.adamw import AdamW
from nxtrain.optim.rule_numbers import RuleNumbers
from nxtrain.optim.schedule import Schedule, decay_factor, numbers_of_update, rule_schedules
from tests.support.adamw import LAYOUT, TABLE, first, grads_of, host, precision, wide_newton_schulz
from tests.support.drawn_schedules import follow_by_hand, value_at
from tests.unit.optim import test_muon
from tests.unit.optim.test_skipping import RULES, held

STEPS = 12
LR, SCALE = 1e-2, 0.25
KERNELS: dict[str, Callable[[], Kernels]] = {"cpu": CpuKernels, "fused": FusedKernels, "plain": PlainKernels}


def drawn_pieces(rng: Random, *values: float) -> list[dict[str, Any]]:
    """Pieces that end inside the steps, or after them."""
    shapes = ("linear", "cosine", "sqrt", "constant")
    return [{"steps": rng.randint(1, 5), "to": rng.choice(values), "shape": rng.choice(shapes)} for _ in range(3)]


def drawn(seed: int, *, betas: bool) -> OptimConfig:
    rng = Random(f"rule numbers/{seed}")
    keys: dict[str, Any] = {
        "lr": LR,
        "weight_decay": rng.choice((0.5, 3.0)),
        "weight_decay_schedule": ("constant", "corrected", "decoupled")[seed % 3],
        "betas": rng.choice(((0.9, 0.95), (0.8, 0.999))),
        "eps": 1e-6,
    }
    if keys["weight_decay_schedule"] == "constant" or rng.random() < 0.5:
        keys["weight_decay_pieces"] = drawn_pieces(rng, 0.0, 1.0, 4.0)
    if betas:
        keys["beta1_pieces"] = drawn_pieces(rng, 0.0, 0.5, 0.95)
        if rng.random() < 0.5:
            keys["beta2_pieces"] = drawn_pieces(rng, 0.5, 0.99, 0.9999)
    return OptimConfig.model_validate(keys)


def rate_of(step: int) -> float:
    """Learning rate of an update, counted from 1, below its highest value in every one."""
    return LR * (0.1 + 0.8 * step / STEPS)


def optimizer(optim: OptimConfig, kernels: Kernels, types: Any = ("fp32", torch.float32, torch.float32)) -> Any:
    update, params, state = types
    shards = {name: p.detach() for name, p in first(params).items()}
    return AdamW(shards, LAYOUT, kernels, host, precision=precision(params, update, state), seed=0, optim=optim), shards


def steps(adamw: AdamW, numbers: range, dtype: torch.dtype = torch.float32, skip: bool | None = None) -> None:
    """Updates by their numbers, counted from 1."""
    for step in numbers:
        skipped = None if skip is None else torch.tensor(skip)
        adamw.step(grads_of(step, dtype), torch.tensor(rate_of(step)), torch.tensor(SCALE), skipped)


def torchs(optim: OptimConfig) -> dict[str, Tensor]:
    """Weights after the steps of torch's AdamW in float64, whose groups get the numbers of each step by hand."""
    parameters = {name: nn.Parameter(p.detach().double()) for name, p in first(torch.float32).items()}
    groups: list[dict[str, Any]] = []
    for decays in (True, False):
        groups.append(
            {"params": [p for name, p in parameters.items() if TABLE[name].decay == decays], "decays": decays}
        )
    reference = torch.optim.AdamW(groups, betas=optim.betas, eps=optim.eps)
    follow_by_hand(reference, optim, LR, lambda step: rate_of(step) / LR)
    for step in range(1, STEPS + 1):
        for name, grad in grads_of(step, torch.float32).items():
            parameters[name].grad = grad.double() * SCALE
        reference.step()
    return {name: p.detach() for name, p in parameters.items()}


def formula(optim: OptimConfig) -> dict[str, Tensor]:
    """Weights after the steps of Adam in float64, with means over the sum of the weights of all their values."""
    weights = {name: p.detach().double() for name, p in first(torch.float32).items()}
    means = {name: torch.zeros_like(p) for name, p in weights.items()}
    squares = {name: torch.zeros_like(p) for name, p in weights.items()}
    of_mean = of_squares = 0.0
    for step in range(1, STEPS + 1):
        beta1 = value_at(optim.betas[0], optim.beta1_pieces, step)
        beta2 = value_at(optim.betas[1], optim.beta2_pieces, step)
        of_mean = beta1 * of_mean + 1 - beta1
        of_squares = beta2 * of_squares + 1 - beta2
        rate = rate_of(step)
        factors = {"constant": rate, "corrected": rate * rate / LR, "decoupled": rate / LR}
        decay = value_at(optim.weight_decay, optim.weight_decay_pieces, step) * factors[optim.weight_decay_schedule]
        for name, given in grads_of(step, torch.float32).items():
            grad = given.double() * SCALE
            means[name] = beta1 * means[name] + (1 - beta1) * grad
            squares[name] = beta2 * squares[name] + (1 - beta2) * grad.square()
            update = means[name] / of_mean / ((squares[name] / of_squares).sqrt() + optim.eps)
            weights[name] = weights[name] * (1 - decay * TABLE[name].decay) - rate * update
    return weights


def error(shards: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    return max((shards[name].double() - wanted).abs().max().item() for name, wanted in expected.items())


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("betas", [False, True], ids=["decay", "betas"])
def test_updates_are_those_of_torch_with_other_groups_in_each_step(kernels: str, betas: bool) -> None:
    for seed in range(9):
        optim = drawn(seed, betas=betas)
        adamw, shards = optimizer(optim, KERNELS[kernels]())
        steps(adamw, range(1, STEPS + 1))
        assert error(shards, torchs(optim)) < 2e-6, optim


def test_groups_of_torch_that_are_changed_by_hand_follow_the_formula() -> None:
    for seed in range(9):
        optim = drawn(seed, betas=seed > 2)
        assert error(torchs(optim), formula(optim)) < 1e-13, optim


def test_a_decay_by_the_highest_rate_alone_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    optim = drawn(1, betas=False)
    assert optim.weight_decay_schedule == "corrected"
    sound = RuleNumbers.weight_decay
    monkeypatch.setattr(RuleNumbers, "weight_decay", lambda self, step, lr: sound(self, step, torch.tensor(LR)))
    adamw, shards = optimizer(optim, PlainKernels())
    steps(adamw, range(1, STEPS + 1))
    assert error(shards, torchs(optim)) > 1e-3


def test_a_bias_correction_by_the_beta_of_the_step_alone_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = RuleNumbers._mean

    def mean(self: RuleNumbers, name: str, step: Tensor) -> MeanDecay:
        result = sound(self, name, step)
        return result._replace(correction=bias_correction(float(result.keep), step))

    monkeypatch.setattr(RuleNumbers, "_mean", mean)
    optim = OptimConfig.model_validate({"lr": LR, "betas": (0.5, 0.95), "beta1_pieces": [{"steps": 8, "to": 0.95}]})
    adamw, shards = optimizer(optim, PlainKernels())
    steps(adamw, range(1, STEPS + 1))
    assert error(shards, torchs(optim)) > 1e-3


@pytest.mark.parametrize("types", RULES, ids=str)
def test_state_that_is_copied_inside_a_piece_goes_on_with_the_same_bits(types: Any) -> None:
    for seed in range(3):
        optim = drawn(seed, betas=seed > 0)
        adamw, shards = optimizer(optim, CpuKernels(), types)
        steps(adamw, range(1, 4), types[1])
        resumed, others = optimizer(optim, CpuKernels(), types)
        for name, x in shards.items():
            others[name].copy_(x)
        for kind, tensors in adamw.state.items():
            for name, x in tensors.items():
                resumed.state[kind][name].copy_(x)
        resumed.num_updates.copy_(adamw.num_updates)
        for each in (adamw, resumed):
            steps(each, range(4, 9), types[1])
        assert all(torch.equal(others[name], x) for name, x in shards.items())


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("types", RULES, ids=str)
def test_a_skipped_step_changes_no_bit(kernels: str, types: Any) -> None:
    adamw, shards = optimizer(drawn(1, betas=types[0] != "fp32"), KERNELS[kernels](), types)
    steps(adamw, range(1, 4), types[1])
    before = held(adamw, shards)
    grads = grads_of(5, types[1])
    grads["matrix"][3, 2] = float("nan")
    adamw.step(grads, torch.tensor(LR), torch.tensor(float("nan")), torch.tensor(True))
    after = held(adamw, shards)
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    steps(adamw, range(6, 8), types[1], skip=False)
    assert all(x.isfinite().all() for x in shards.values())


def test_an_overflow_of_fp16_is_no_update_of_the_pieces() -> None:
    types = ("fp32_master", torch.float16, torch.float32)
    (plain, shards), (tried, others) = (optimizer(drawn(1, betas=True), PlainKernels(), types) for _ in range(2))
    for step in range(1, 8):
        for adamw, skips in ((tried, True), (tried, False), (plain, False)):
            if not skips or step in (1, 2, 5):
                steps(adamw, range(step, step + 1), torch.float16, skip=skips)
    assert all(torch.equal(others[name], x) for name, x in shards.items())


@pytest.mark.parametrize("types", RULES[1:], ids=str)
def test_rules_of_bf16_take_the_updates_of_float32(types: Any) -> None:
    optim = drawn(4, betas=True)
    start = {name: p.detach().float() for name, p in first(torch.bfloat16).items()}
    wide, expected = optimizer(optim, CpuKernels())
    for name, x in start.items():
        expected[name].copy_(x)
    adamw, shards = optimizer(optim, CpuKernels(), types)
    for step in range(1, STEPS + 1):
        grads = grads_of(step, torch.bfloat16)
        for each, dtype in ((adamw, torch.bfloat16), (wide, torch.float32)):
            own = {name: grad.to(dtype) for name, grad in grads.items()}
            each.step(own, torch.tensor(rate_of(step)), torch.tensor(SCALE))
    for name, x in expected.items():
        kept = adamw.state.get("master", shards)[name].float()
        if "compensation" in adamw.state:
            kept = kept + adamw.state["compensation"][name]
        # Masters are exact, Kahan's rule keeps 16 bits, and rounding at random moves by units of 8 bits, also in means.
        allowed = {"fp32_master": 0.0, "bf16_kahan": 2.0**-14, "bf16_stochastic": 2.0**-4}[types[0]]
        if types[2] == torch.bfloat16:
            allowed = 2.0**-4
        torch.testing.assert_close(kept, x, rtol=0, atol=allowed)


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_momentum_that_changes_is_that_of_torchs_muon(monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    monkeypatch.setattr(torch_muon, "_zeropower_via_newtonschulz", wide_newton_schulz())
    pieces = [{"steps": 5, "to": 0.95}]
    for seed, decay_schedule in enumerate(("constant", "corrected", "decoupled")):
        optim: dict[str, Any] = {"muon_momentum": 0.7, "muon_momentum_pieces": pieces}
        optim |= {"weight_decay_schedule": decay_schedule, "weight_decay": 0.4}
        table = test_muon.drawn_table(seed)
        shards = test_muon.first(table)
        test_muon.trained(test_muon.muon(table, shards, KERNELS[kernels](), **optim), table)
        expected = test_muon.torchs(table, **optim)
        assert max(test_muon.errors(table, shards, expected).values()) < 1e-6
        stays = test_muon.first(table)
        test_muon.trained(test_muon.muon(table, stays, **{**optim, "muon_momentum_pieces": []}), table)
        assert max(test_muon.errors(table, stays, expected).values()) > 1e-4


@pytest.mark.parametrize("betas", [(0.9, 0.99999), (0.0, 0.5)])
def test_bias_corrections_have_the_digits_of_float32_at_every_update(betas: tuple[float, float]) -> None:
    start, end = betas
    long, short = {"steps": 200, "to": end, "shape": "cosine"}, {"steps": 30, "to": start}
    for beta2, piece in ((start, long), (end, short)):
        optim = OptimConfig.model_validate({"betas": (0.9, beta2), "beta2_pieces": [piece]})
        numbers, product = RuleNumbers(optim, host), 1.0
        for step in range(1, 400):
            beta = value_at(optim.betas[1], optim.beta2_pieces, step)
            product *= beta
            means = numbers.means(torch.tensor(float(step)))
            assert means is not None
            assert means[1].correction.item() == pytest.approx(1 - product, rel=3e-6), step
            assert float(means[1].keep) == pytest.approx(beta, rel=1e-7)
            assert float(means[1].add) == pytest.approx(1 - beta, rel=1e-7)
            assert means[0].correction.item() == pytest.approx(1 - 0.9**step, rel=3e-6)


def test_numbers_that_stay_are_numbers_of_the_host() -> None:
    optim = OptimConfig(weight_decay=0.3)
    numbers, step = RuleNumbers(optim, host), torch.tensor(1.0)
    assert numbers.weight_decay(step, step) == 0.3
    assert numbers.means(step) is None
    assert numbers.momentum(step) == (0.95, 1 - 0.95)


def test_numbers_of_an_update_are_those_of_the_device() -> None:
    for seed in range(9):
        optim = drawn(seed, betas=seed % 2 == 0)
        numbers = RuleNumbers(optim, host)
        for number in (1, 4, 20):
            step, rate = torch.tensor(float(number)), torch.tensor(rate_of(number))
            of_update = numbers_of_update(optim, number, rate_of(number))
            assert of_update.weight_decay == pytest.approx(float(numbers.weight_decay(step, rate)), rel=1e-6)
            means = numbers.means(step)
            if means is not None:
                assert of_update.betas == pytest.approx([float(mean.keep) for mean in means])


def test_schedules_of_numbers_are_described() -> None:
    keys: dict[str, Any] = {"muon_momentum": 0.85, "muon_momentum_pieces": [{"steps": 300, "to": 0.95}]}
    optim = OptimConfig.model_validate({**keys, "weight_decay_schedule": "corrected", "lr": 3e-3, "weight_decay": 0.1})
    assert decay_factor(optim) == "0.1 x lr^2 / 0.003"
    (schedule,) = rule_schedules(optim).values()
    assert schedule.describe() == "steps 1 to 300: up to 0.95 (linear)"
    assert schedule.at(150) == pytest.approx(0.9)
    values = list(schedule.values())
    assert values == [schedule.at(step) for step in range(301)]
    assert list(Schedule.constant(0.5).values()) == [0.5]
    highest = {"schedule": "pieces", "pieces": [{"steps": 2, "lr": 0.5}, {"steps": 2, "lr": 0.1}]}
    assert OptimConfig.model_validate(highest).highest_lr == 0.5
