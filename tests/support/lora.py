"""Drawn runs that train adapters, beside PEFT with `torch.optim` on one process.

Adapters of experts have values by our names; PEFT stacks the same values, entry by entry.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, partial
from random import Random
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn

from nxtrain.backends.cpu import CpuBackend
from nxtrain.common.dimensions import MoeShape
from nxtrain.config.check import Resolved
from nxtrain.config.tables import toml_value
from nxtrain.nn.lora import EXPERT_TARGETS, A
from tests.support.drawn import Drawn, draw
from tests.support.drawn_runs import first_weights, ours
from tests.support.layouts import ONE, Degrees
from tests.support.models import changed
from tests.support.parity import Course, reference, whole

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class DrawnAdapters(Drawn):
    """A drawn run that trains adapters of some layers."""

    finetune: tuple[tuple[str, Any], ...] = ()

    @property
    def resolved(self) -> Resolved:
        """The configuration, held to every rule but that of the weights' folder, which is none here."""
        return changed(super().resolved, finetune=dict(self.finetune))


def draw_adapters(lane: str, seed: int, index: int, degrees: Degrees = ONE, **kinds: Any) -> DrawnAdapters:
    """One run of a layout; see `draw`."""
    drawn = draw(lane, seed, index, degrees, **kinds)
    rng = Random(f"adapters/{lane}/{seed}/{index}")
    r = rng.randint(1, 6)
    alpha = r * rng.choice((0.5, 1.0, 2.0))
    rslora = rng.random() < 0.3
    targets = () if rng.random() < 0.4 else tuple(rng.sample(LAYERS, rng.randint(1, 6)))
    if targets and drawn.most_keys == 1 and set(targets) <= {"q_proj", "k_proj"}:
        targets = (*targets, "v_proj")
    values = {"method": "lora", "r": r, "alpha": alpha, "rslora": rslora, "targets": targets}
    run = DrawnAdapters(**{field.name: getattr(drawn, field.name) for field in fields(drawn)})
    return replace(run, finetune=tuple(values.items()))


def draw_quantized(lane: str, seed: int, index: int, degrees: Degrees = ONE, **kinds: Any) -> DrawnAdapters:
    """One run whose ranks hold whole blocks of NF4; other sizes than widths are those of `draw_adapters`."""
    drawn = draw_adapters(lane, seed, index, degrees, **kinds)
    rng, tp = Random(f"quantized/{lane}/{seed}/{index}"), degrees.tp
    heads = tp * rng.choice((1, 2, 4))
    divisors = [n for n in range(1, heads + 1) if heads % n == 0 and (n % tp == 0 or tp % n == 0)]
    widths = {
        "hidden_size": 64 * rng.randint(1, 2),
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice(divisors),
        "head_dim": 64 * tp // heads * rng.choice((1, 2)),
        "intermediate_size": 64 * tp * rng.randint(1, 2) if tp > 1 else rng.randint(1, 120),
    }
    lines = tuple(f"model.config.{key}={value}" for key, value in widths.items())
    finetune = {**dict(drawn.finetune), "method": "qlora"}
    return replace(drawn, overrides=(*drawn.overrides, *lines), finetune=tuple(finetune.items()))


def with_keys(drawn: DrawnAdapters, **changes: Any) -> DrawnAdapters:
    """The same run with other values of some keys; `parallel__offload` is `parallel.offload`."""
    lines = {line.partition("=")[0]: line for line in drawn.overrides}
    for name, value in changes.items():
        key = name.replace("__", ".")
        lines[key] = f"{key}={toml_value(value)}"
    return replace(drawn, overrides=tuple(lines.values()))


def with_dropout(drawn: DrawnAdapters, share: float = 0.3) -> DrawnAdapters:
    """The same run with masks, and recomputation of whole blocks."""
    return replace(with_keys(drawn, train__remat="full"), finetune=(*drawn.finetune, ("dropout", share)))


def wanted_of_one_rank(drawn: DrawnAdapters) -> Course:
    """The course of one CPU rank that recomputes nothing, and fuses the layers that the run does not fuse."""
    model = drawn.resolved.config.model
    alone = with_keys(
        drawn,
        train__remat="none",
        backend__name="cpu",
        model__fused_qkv=not model.fused_qkv,
        model__fused_gate_up=not model.fused_gate_up,
    )
    plain = [line for line in alone.overrides if not line.startswith(("parallel.", "backend.cpu_transport"))]
    alone = replace(alone, degrees=ONE, overrides=(*plain, "parallel.tp=1"))
    course = ours(CpuBackend(), alone, all_weights(drawn))
    return replace(course, weights=whole([course.weights], alone.resolved))


def restored_by_bitsandbytes(whole: Tensor) -> Tensor:
    """A whole matrix, quantized and restored with a block in each row: bitsandbytes 0.50 fails on CPUs otherwise."""
    from bitsandbytes import functional

    codes, state = functional.quantize_4bit(whole.reshape(-1, 64), compress_statistics=True, quant_type="nf4")
    result: Tensor = functional.dequantize_4bit(codes, state)
    return result.view(whole.shape)


def restored(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole weights, the matrices of the blocks quantized and restored."""
    return {
        name: restored_by_bitsandbytes(x) if x.dim() > 1 and ".layers." in name and "lora" not in name else x
        for name, x in weights.items()
    }


def targets_of(resolved: Resolved) -> tuple[str, ...]:
    return resolved.config.finetune.targets or LAYERS


@cache
def _peft() -> Any:
    """PEFT, imported late; bitsandbytes would import torch's compiler to wrap functions."""
    with patch("torch.compile", lambda function, **_: function):
        import peft
    return peft


def adapted(resolved: Resolved, model: nn.Module) -> nn.Module:
    peft = _peft()
    config = resolved.config.finetune
    lora = peft.LoraConfig(
        r=config.r,
        lora_alpha=cast(int, config.alpha),
        use_rslora=config.rslora,
        target_modules=[target for target in targets_of(resolved) if target not in EXPERT_TARGETS],
        target_parameters=[target for target in targets_of(resolved) if target in EXPERT_TARGETS],
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        return cast(nn.Module, peft.get_peft_model(model, lora))


def our_name(name: str) -> str:
    """Our name of a parameter of PEFT's model."""
    return name.removeprefix("base_model.model.").removesuffix(".weight").removesuffix(".default")


def adapters_of(resolved: Resolved, base: Mapping[str, Tensor], seed: int = 7) -> dict[str, Tensor]:
    """Whole matrices of all adapters, none of them zero, by our names."""
    generator = torch.Generator().manual_seed(seed)
    config, result = resolved.config.finetune, {}
    for name, weight in base.items():
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] in targets_of(resolved):
            for leaf, shape in ((A, (config.r, weight.shape[1])), ("lora_B", (weight.shape[0], config.r))):
                std = 1 / max(shape[1], 4) ** 0.5
                result[f"{layer}.{leaf}"] = torch.randn(shape, generator=generator) * std * (1.0 if leaf == A else 0.3)
    return result | expert_adapters(resolved, generator)


def all_weights(drawn: DrawnAdapters) -> dict[str, Tensor]:
    """Whole weights at step 0, those of adapters included."""
    base = first_weights(drawn)
    return {**base, **adapters_of(drawn.resolved, base)}


def with_adapters(resolved: Resolved, weights: Mapping[str, Tensor], model: nn.Module) -> nn.Module:
    """PEFT's model in float64, with our adapters."""
    result: nn.Module = adapted(resolved, model).double()
    with torch.no_grad():
        for name, parameter in result.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(of_peft(our_name(name), weights, resolved))
    return result


def wanted_of_peft(drawn: DrawnAdapters) -> Course:
    """The course of PEFT, in float64, beside restored weights if the run quantizes them."""
    weights = all_weights(drawn)
    if drawn.resolved.config.finetune.method == "qlora":
        weights = restored(weights)

    wrap = partial(with_adapters, drawn.resolved, weights)
    course = reference(drawn.resolved, drawn.steps, data=drawn.batches(), weights=weights, wrap=wrap)
    results: dict[str, Tensor] = {}
    for name, tensor in course.weights.items():
        results |= of_ours(our_name(name), tensor, drawn.resolved)
    return replace(course, weights=results)


def described(drawn: DrawnAdapters) -> str:
    """Layout and adapters of a run, for messages."""
    return f"{drawn.degrees} {asdict(drawn)['finetune']}"


GATE_UP, DOWN = "experts.gate_up_proj", "experts.down_proj"


def shapes_of(resolved: Resolved) -> dict[str, tuple[int, int]]:
    """Shape of each matrix of the adapters of an expert that the run trains."""
    mixture, hidden = _mixture(resolved), resolved.model.hidden_size
    r, inner, shapes = resolved.config.finetune.r, mixture.expert_size, dict[str, tuple[int, int]]()
    if GATE_UP in resolved.config.finetune.targets:
        shapes |= {"gate_up_proj.lora_A": (r, hidden)}
        shapes |= {f"{name}.lora_B": (inner, r) for name in ("gate_proj", "up_proj")}
    if DOWN in resolved.config.finetune.targets:
        shapes |= {"down_proj.lora_A": (r, inner), "down_proj.lora_B": (hidden, r)}
    return shapes


def expert_adapters(resolved: Resolved, generator: torch.Generator) -> dict[str, Tensor]:
    """Whole matrices of the adapters of all experts, none of them zero, by our names."""
    found: dict[str, Tensor] = {}
    if resolved.dimensions.mixture is None:
        return found
    mixture = resolved.dimensions.mixture
    for layer in range(resolved.model.num_hidden_layers):
        if layer in resolved.dimensions.dense_layers:
            continue
        for expert in range(mixture.num_experts):
            for name, shape in shapes_of(resolved).items():
                std = 1 / max(shape[1], 4) ** 0.5
                drawn = torch.randn(shape, generator=generator) * std * (1.0 if name.endswith("lora_A") else 0.3)
                found[f"model.layers.{layer}.{mixture.module}.experts.{expert}.{name}"] = drawn
    return found


def of_peft(name: str, weights: Mapping[str, Tensor], resolved: Resolved) -> Tensor:
    """PEFT's value of a matrix, from those of each expert."""
    if ".experts" not in name:
        return weights[name]
    number, module, matrix = _place(name, resolved)
    if name.endswith("lora_A"):
        return torch.cat([weights[f"{module}.{expert}.{matrix}.lora_A"] for expert in range(number)])
    parts = ("gate_proj", "up_proj") if matrix == "gate_up_proj" else (matrix,)
    by_expert = []
    for expert in range(number):
        by_expert.append(torch.cat([weights[f"{module}.{expert}.{part}.lora_B"] for part in parts]))
    r = resolved.config.finetune.r
    return torch.stack([by_expert[expert][:, column] for column in range(r) for expert in range(number)], dim=1)


def of_ours(name: str, tensor: Tensor, resolved: Resolved) -> dict[str, Tensor]:
    """Our matrices of each expert, from PEFT's of all."""
    if ".experts" not in name:
        return {name: tensor}
    number, module, matrix = _place(name, resolved)
    r, found = resolved.config.finetune.r, dict[str, Tensor]()
    for expert in range(number):
        if name.endswith("lora_A"):
            found[f"{module}.{expert}.{matrix}.lora_A"] = tensor[expert * r : (expert + 1) * r]
            continue
        own = tensor[:, expert::number]
        half = len(own) // 2
        parts = {matrix: own} if matrix == "down_proj" else {"gate_proj": own[:half], "up_proj": own[half:]}
        found |= {f"{module}.{expert}.{part}.lora_B": value for part, value in parts.items()}
    return found


def _place(name: str, resolved: Resolved) -> tuple[int, str, str]:
    """Number of experts, our name of their module, and the matrix that PEFT's wrapper adapts."""
    mixture, targets = _mixture(resolved), resolved.config.finetune.targets
    block, _, rest = name.partition(".mlp.experts")
    is_down = DOWN in targets and "base_layer" not in rest
    return mixture.num_experts, f"{block}.{mixture.module}.experts", "down_proj" if is_down else "gate_up_proj"


def _mixture(resolved: Resolved) -> MoeShape:
    assert resolved.dimensions.mixture is not None
    return resolved.dimensions.mixture
