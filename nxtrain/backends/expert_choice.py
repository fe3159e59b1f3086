"""Shape of a rank's mixture-of-experts layer, and the choice of its kernels. Importable without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from nxtrain.common.dimensions import Dimensions
from nxtrain.config.schema import RunConfig


class ExpertChoice(NamedTuple):
    """Kernels of the experts' matrix products, and the reason for the choice."""

    kind: Literal["blockwise", "plain"]
    reason: str

    def __str__(self) -> str:
        return f"{self.kind} experts: {self.reason}"


@dataclass(frozen=True)
class ExpertShape:
    """Shape of the experts that a rank computes in each transformer block.

    Args:
        num_tokens: Tokens of a micro-batch over all expert parallel ranks, the most that may reach a rank's experts.
        hidden_size: Width of the model.
        width: Intermediate size of an expert on this rank.
        params: `fp32` or `bf16`, the type of the weights.
        dropless: Experts compute every token that is routed to them.
        is_plain: Experts are gated matrices without biases, clamped activations and adapters.
    """

    num_tokens: int
    hidden_size: int
    width: int
    params: str
    dropless: bool = True
    is_plain: bool = True

    @staticmethod
    def of(config: RunConfig, dimensions: Dimensions) -> ExpertShape | None:
        """Return the shape of a run's experts; None for a model without experts."""
        mixture, parallel = dimensions.mixture, config.parallel
        if mixture is None:
            return None
        adapted = [target for target in config.finetune.targets if target.startswith("experts.")]
        has_adapters = config.finetune.adapts and bool(adapted)
        return ExpertShape(
            num_tokens=config.train.seq_len // parallel.cp * config.train.micro_batch * parallel.ep,
            hidden_size=dimensions.hidden_size,
            width=mixture.expert_size // parallel.tp,
            params=config.precision.params,
            dropless=config.model.moe_dispatch == "dropless",
            is_plain=mixture.limit is None and not mixture.biases and not has_adapters,
        )
