"""Peers of `nxtrain bench train`: the same model in other trainers, on the same data, with the same clipping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nxtrain.common.family import find_family
from nxtrain.tools.bench.clocks import Clocks
from nxtrain.tools.bench.train import Workload

LR, CLIP = 1e-4, 1.0


def batch(work: Workload, sequences: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs and targets, (B, S) each, the same for every implementation; by default the workload's batch."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, work.shape["vocab_size"], (sequences or work.batch, work.seq_len + 1), generator=generator)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def transformers_step(work: Workload, clocks: Clocks, *, fused: bool, compiled: bool) -> Callable[[], float]:
    """Step of transformers' model as its documentation trains it: loss of the step.

    Args:
        work: Workload.
        clocks: The device.
        fused: torch's fused AdamW; otherwise AdamW's defaults.
        compiled: The model goes through torch.compile.
    """
    import transformers

    dtype = torch.bfloat16 if work.precision == "bf16" else torch.float32
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**hf_config(work), attn_implementation="sdpa", use_cache=False)
    model = transformers.LlamaForCausalLM(config).to(device=clocks.device, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True if fused else None)
    inputs, targets = (x.to(clocks.device) for x in batch(work))
    forward: Callable[..., Any] = model
    if compiled:
        forward = torch.compile(model, dynamic=False)

    def step() -> float:
        # `shift_labels` are targets as they stand, so both sides count the same tokens.
        loss = forward(input_ids=inputs, labels=targets, shift_labels=targets).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return clocks.read(loss.detach())

    return step


def hf_config(work: Workload) -> dict[str, Any]:
    """The model's `config.json`, without the fields that name its class and type."""
    family = find_family("llama")
    dtype = "bfloat16" if work.precision == "bf16" else "float32"
    config = family.to_hf(family.config_type.model_validate(work.shape), dtype)
    return {name: value for name, value in config.items() if name not in {"architectures", "dtype", "torch_dtype"}}
