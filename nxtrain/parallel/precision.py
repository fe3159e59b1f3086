"""Number types of all tensors in a training step, derived from `[precision]` of the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from nxtrain.config.schema import PrecisionConfig

Update = Literal["fp32", "fp32_master", "bf16_stochastic", "bf16_kahan"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """Number types (dtypes) of the tensors of a run.

    Args:
        params: Type of parameters and activations, and of parameters in checkpoints.
        accumulate: Type in which gradients are summed over micro-batches.
        reduce: Type in which gradients are summed over data parallel ranks.
        update: Update rule that rounds the float32 result of an optimizer update to a parameter.
        state: Type of the optimizer's running means.
    """

    params: torch.dtype
    accumulate: torch.dtype
    reduce: torch.dtype
    update: Update
    state: torch.dtype

    @staticmethod
    def of(config: PrecisionConfig) -> Precision:
        """Number types from a validated `[precision]` configuration."""
        return Precision(
            params=DTYPES[config.params],
            accumulate=DTYPES[config.accumulate],
            reduce=DTYPES[config.reduce],
            update=config.update,
            state=DTYPES[config.state],
        )

    @property
    def sharded_params(self) -> torch.dtype:
        """Type in which `fully_shard` stores parameters; `fully_shard` casts reduced gradients to the same type."""
        if self.params == torch.float32:
            return self.params
        return self.reduce


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a torch type without its prefix, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")
