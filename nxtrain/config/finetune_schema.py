"""Schema of [finetune]: the trained share of a model that begins from given weights, and the objective."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat

from nxtrain.config.section import LocalText, Section, Size

ADAPTER_KEYS = ("r", "alpha", "dropout", "targets", "rslora")
"""Keys of [finetune] that shape adapters."""


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
    objective: Literal["sft", "dpo", "orpo", "kto"] = "sft"
    """Likelihood of the tokens (sft), preference between the two answers of each pair, dpo beside a reference and orpo
    without one, or value of answers that are labelled as desirable or not, beside a reference (kto)."""
    beta: PositiveFloat = 0.1
    """With objective=dpo or kto, factor of the log-ratio of probabilities; larger stays nearer to the reference."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """With objective=dpo, share of the pairs whose answers are assumed to be swapped."""
    orpo_lambda: PositiveFloat = 0.1
    """With objective=orpo, weight of the odds ratio beside the likelihood of the chosen answer."""
    desirable_weight: PositiveFloat = 1.0
    """With objective=kto, factor of the losses of desirable answers."""
    undesirable_weight: PositiveFloat = 1.0
    """With objective=kto, factor of the losses of undesirable answers."""
    pairs_per_row: Size = 8
    """Most pairs that share a row of dpo and orpo, and half of the most answers of kto; a graph is made for it."""

    @property
    def adapts(self) -> bool:
        """True if adapters are trained beside frozen weights."""
        return self.method != "full"

    @property
    def compares(self) -> bool:
        """True if the objective compares whole answers: dpo, orpo or kto."""
        return self.objective != "sft"

    @property
    def stores_reference(self) -> bool:
        """True if log-probabilities of the reference are stored before training.

        Without them, the frozen weights below new adapters are the reference.
        """
        return self.objective in {"dpo", "kto"} and (not self.adapts or bool(self.adapter))
