"""Schema of [finetune]: the trained share of a model that begins from given weights, and the objective."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat

from nxtrain.config.section import LocalText, Section, Size


class FinetuneConfig(Section):
    """[finetune]: trained share of a model that begins from given weights."""

    method: Literal["full", "lora", "qlora"] = "full"
    """Every weight, or low-rank adapters of linear layers beside frozen weights; with qlora, matrices of the blocks
    are frozen in NF4."""
    r: Size = 16
    """Rank of each adapter."""
    alpha: PositiveFloat = 32.0
    """Factor of an adapter's output, divided by r."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of the entries of an adapter's input that a training step leaves out at random."""
    targets: tuple[str, ...] = Field(default=(), strict=False)
    """Linear layers with an adapter, such as `q_proj`; empty: every linear layer of the blocks. Experts have adapters
    if `experts.gate_up_proj` or `experts.down_proj` is named."""
    rslora: bool = False
    """Divide alpha by the square root of r instead."""
    adapter: LocalText = ""
    """Folder of an adapter in PEFT's format with which the run begins; empty: a new one, which changes nothing yet."""
    objective: Literal["sft", "dpo", "orpo"] = "sft"
    """Likelihood of the tokens (sft), or preference between the two answers of each pair: dpo beside a reference, orpo
    without one."""
    beta: PositiveFloat = 0.1
    """With objective=dpo, factor of the log-ratio of probabilities; larger stays nearer to the reference."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """With objective=dpo, share of the pairs whose answers are assumed to be swapped."""
    orpo_lambda: PositiveFloat = 0.1
    """With objective=orpo, weight of the odds ratio beside the likelihood of the chosen answer."""
    pairs_per_row: Size = 8
    """Most pairs that share a row of dpo and orpo; a graph is made for this number."""

    @property
    def adapts(self) -> bool:
        """True if adapters are trained beside frozen weights."""
        return self.method != "full"

    @property
    def compares(self) -> bool:
        """True if the objective is on pairs of answers."""
        return self.objective != "sft"

    @property
    def stores_reference(self) -> bool:
        """True if the reference is computed before training: where it is not what the frozen weights compute."""
        return self.objective == "dpo" and (not self.adapts or bool(self.adapter))
