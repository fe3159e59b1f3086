"""Schema of [finetune]: full training, LoRA or QLoRA of given weights, and the training objective."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat

from nxtrain.config.section import LocalText, Section, Size

ADAPTER_KEYS = ("r", "alpha", "dropout", "targets", "rslora")
"""Keys of [finetune] that shape adapters."""


class FinetuneConfig(Section):
    """[finetune]: full training or adapters on given weights, and the training objective."""

    method: Literal["full", "lora", "qlora"] = "full"
    """Training method: full trains all weights. lora trains low-rank adapters, with frozen base weights. qlora also
    keeps the frozen matrices of the blocks in NF4."""
    r: Size = 16
    """Rank of each adapter."""
    alpha: PositiveFloat = 32.0
    """Scale of an adapter's output, divided by r."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout probability of the entries of an adapter's input."""
    targets: tuple[str, ...] = Field(default=(), strict=False)
    """Linear layers with an adapter, such as `q_proj`. Empty for every linear layer of the blocks. Experts get adapters
    only if `experts.gate_up_proj` or `experts.down_proj` is named."""
    rslora: bool = False
    """Divide alpha by the square root of r, instead of by r."""
    adapter: LocalText = ""
    """Folder of an adapter in PEFT's format that initializes the adapters. Empty for new adapters with zero output."""
    objective: Literal["sft", "dpo", "orpo", "kto"] = "sft"
    """Training objective. sft is the likelihood of tokens. dpo and orpo prefer one of two answers, dpo against a
    reference model. kto rates answers labelled as desirable or not, against a reference model."""
    beta: PositiveFloat = 0.1
    """With objective=dpo or kto, factor of the log-ratio of probabilities. Larger values stay closer to the
    reference."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """With objective=dpo, share of the pairs whose labels are assumed to be swapped."""
    orpo_lambda: PositiveFloat = 0.1
    """With objective=orpo, weight of the odds ratio loss, added to the likelihood loss of the chosen answer."""
    desirable_weight: PositiveFloat = 1.0
    """With objective=kto, weight of the losses of desirable answers."""
    undesirable_weight: PositiveFloat = 1.0
    """With objective=kto, weight of the losses of undesirable answers."""
    pairs_per_row: Size = 8
    """Maximum pairs that share a row with dpo and orpo. kto allows twice as many answers. Graphs have this size."""

    @property
    def adapts(self) -> bool:
        """True if adapters are trained and the other weights are frozen."""
        return self.method != "full"

    @property
    def compares(self) -> bool:
        """True if the objective compares whole answers: dpo, orpo or kto."""
        return self.objective != "sft"

    @property
    def stores_reference(self) -> bool:
        """True if log-probabilities of the reference model are computed and stored before training.

        Otherwise the reference is the frozen weights without the new adapters.
        """
        return self.objective in {"dpo", "kto"} and (not self.adapts or bool(self.adapter))
