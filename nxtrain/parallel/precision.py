"""Number types of all tensors in a step, derived from `[precision]` in this one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from nxtrain.config.schema import PrecisionConfig

Update = Literal["fp32", "fp32_master", "bf16_stochastic", "bf16_kahan"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """Types of one run.

    Args:
        params: Parameters and activations, and parameters in checkpoints.
        accumulate: Sums of gradients over micro-batches.
        reduce: Sums of gradients over data parallel ranks.
        update: Rule that turns the float32 result of an update into a parameter.
        state: Running means of the optimizer.
    """

    params: torch.dtype
    accumulate: torch.dtype
    reduce: torch.dtype
    update: Update
    state: torch.dtype

    @staticmethod
    def of(config: PrecisionConfig) -> Precision:
        """Types of a checked configuration."""
        return Precision(
            params=DTYPES[config.params],
            accumulate=DTYPES[config.accumulate],
            reduce=DTYPES[config.reduce],
            update=config.update,
            state=DTYPES[config.state],
        )

    @property
    def sharded_params(self) -> torch.dtype:
        """Type in which `fully_shard` stores parameters, which it also gives to reduced gradients."""
        if self.params == torch.float32:
            return self.params
        return self.reduce


def dtype_name(dtype: torch.dtype) -> str:
    """Torch's name of a type, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")
