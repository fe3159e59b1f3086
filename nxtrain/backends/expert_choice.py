"""Choice of the products of experts by the shape of a rank's experts. Importable without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from nxtrain.common.dimensions import Dimensions
from nxtrain.config.schema import RunConfig


class ExpertChoice(NamedTuple):
    """Products of experts, and the reason for them."""

    kind: Literal["blockwise", "plain"]
    reason: str

    def __str__(self) -> str:
        return f"{self.kind} experts: {self.reason}"


@dataclass(frozen=True)
class ExpertShape:
    """Shape of the experts that a rank computes in each block.

    Args:
        num_tokens: Tokens whose experts a rank may compute in a micro-batch, over all ranks that divide the experts.
        hidden_size: Width of the model.
        width: Intermediate size of an expert on this rank.
        params: `fp32` or `bf16`, type of the matrices.
        dropless: Experts compute every token that is routed to them.
        is_plain: Experts are gated matrices alone: without biases, clamped units and adapters.
    """

    num_tokens: int
    hidden_size: int
    width: int
    params: str
    dropless: bool = True
    is_plain: bool = True

    @staticmethod
    def of(config: RunConfig, dimensions: Dimensions) -> ExpertShape | None:
        """Shape of a run's experts; None for a model without experts."""
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
