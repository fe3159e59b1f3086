"""Interface of a model family, which every architecture implements, and discovery of the installed families.

A family is found by its entry point in the group `nxtrain.models`. No module of nxtrain imports a family. Everything in
this module but `ModelFamily.build` works without torch, so a configuration can be checked on any machine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol, cast

from pydantic import BaseModel, ConfigDict

from nxtrain.common.dimensions import Dimensions
from nxtrain.common.errors import ConfigError, Problem
from nxtrain.common.stages import StagePart

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from nxtrain.common.kernels import Kernels
    from nxtrain.common.layers import ContextAttention, LayerSet, RouterLosses


class ModelConfig(BaseModel):
    """Shape of a decoder model, with the key names of Hugging Face configurations. Families add further keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    vocab_size: int
    """Entries of the vocabulary, without padding."""
    hidden_size: int
    """Width of the residual stream."""
    num_hidden_layers: int
    """Number of transformer blocks."""
    tie_word_embeddings: bool = False
    """The output projection shares its matrix with the token embedding."""
    max_position_embeddings: int = 2048
    """Maximum sequence length in tokens."""

    @property
    def longest_sequence(self) -> tuple[str, int]:
        """Configuration key that limits the sequence length, and its value in tokens."""
        return "max_position_embeddings", self.max_position_embeddings


@dataclass(frozen=True)
class Preset:
    """A published model configuration, and a reference to its publication."""

    config: ModelConfig
    source: str


@dataclass(frozen=True)
class BuildContext:
    """Arguments for building a model. Model code itself never asks for a device or a rank.

    Args:
        layers: Implementation of the sharded layers.
        kernels: Device-specific operations.
        dtype: Type of the parameters.
        seq_len: Tokens of a sequence.
        fused_qkv, fused_gate_up: Projections that share an input are fused in one matrix.
        scaled_init: Projections into the residual stream are initialized with std / sqrt(2 * layers).
        decay_norms: Weight decay also applies to norm parameters, including norms of heads.
        parts: Parts of the model to build, ascending; empty for the whole model.
        context_parallel: Attention over the ranks that share the positions of a sequence; None without context
            parallelism.
        router_losses: Auxiliary losses of the routers; None for none.
        moe_capacity_factor: Expert capacity, relative to an even load; None for dropless routing.
    """

    layers: LayerSet
    kernels: Kernels
    dtype: torch.dtype
    seq_len: int
    fused_qkv: bool = True
    fused_gate_up: bool = True
    scaled_init: bool = True
    decay_norms: bool = False
    parts: tuple[StagePart, ...] = ()
    context_parallel: ContextAttention | None = None
    router_losses: RouterLosses | None = None
    moe_capacity_factor: float | None = None


class CausalLM(Protocol):
    """Interface of a built model for training and generation, beyond that of `torch.nn.Module`."""

    context_parallel: ContextAttention | None
    """Attention over the ranks that share the positions of a sequence, set by the builder of the model; None
    without.
    """

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """Transformer blocks, in order of use. Each is all-gathered as one unit when parameters are sharded."""
        ...

    @property
    def routing(self) -> Tensor | None:
        """Auxiliary router losses of the last training loss, (2,) float32; None without experts.

        The entries are the load balancing loss and the z-loss, times the number of targets that count. Each rank of dp
        x cp has its part of a sum.
        """
        ...

    def count_loads(self, loads: Tensor) -> None:
        """Let every training forward pass add the loads of the experts to the tensor `loads`.

        Args:
            loads: (num_hidden_layers, E + 3) float32, the rows of `nxtrain.metrics.routers.Loads`.
        """
        ...

    def run(
        self,
        part: StagePart,
        state: Sequence[Tensor],
        targets: Tensor | None = None,
        starts: Tensor | None = None,
        counted: Tensor | None = None,
    ) -> Sequence[Tensor]:
        """Compute one part of the model on a pipeline stage.

        Args:
            state: Input of the part: (B, S) tokens for the first part. For other parts, activations (S/tp, B, D). In a
                model with E experts, also the routing of all earlier blocks, (2E + 4,) float32.
            targets: (B, S) target tokens, for the last part only.
            starts, counted: As for `loss`, in every part.

        Returns:
            For the last part, the loss as in `loss`. For other parts, the input of the next part.
        """
        ...

    def loss(
        self, inputs: Tensor, targets: Tensor, starts: Tensor | None = None, counted: Tensor | None = None
    ) -> Tensor:
        """Sum of the cross entropies of all tokens, for a whole model: inputs (B, S), targets (B, S) to () float32.

        Layer sets that return one loss per token give (S, B) float32 instead; see `VocabHead`.

        Args:
            starts: (B, S) index at which each position's document starts, for packed documents. Attention stays inside
                a document. None if each row is one document.
            counted: (S/tp, B) float32, 1 for a token that counts in the router losses and 0 otherwise. None if all
                count.
        """
        ...

    def logits(self, inputs: Tensor, starts: Tensor | None = None) -> Tensor:
        """Logits of a whole model, on every rank: (B, S) to (B, S, vocab_size) float32; not differentiable."""
        ...


class ModelFamily(ABC):
    """One model architecture: its configuration, presets, module, Hugging Face conversion and operation counts."""

    name: str
    config_type: type[ModelConfig]
    presets: Mapping[str, Preset]

    @abstractmethod
    def check(self, config: ModelConfig, *, tp: int, seq_len: int) -> list[Problem]:
        """Return all problems of a model configuration at these degrees.

        The keys of the problems are `model.config.*` or `parallel.*`.
        """

    @abstractmethod
    def build(self, config: ModelConfig, context: BuildContext) -> nn.Module:
        """Build the model on the meta device, as a module with the interface of `CausalLM`.

        Parameters that are not fused have Hugging Face's names.
        """

    @abstractmethod
    def from_hf(self, hf_config: Mapping[str, Any]) -> ModelConfig:
        """Convert a Hugging Face `config.json`; an unsupported setting raises a ConfigError."""

    @abstractmethod
    def to_hf(self, config: ModelConfig, dtype: str) -> dict[str, Any]:
        """Convert to a Hugging Face `config.json`; `dtype` is torch's name for the type of the weights."""

    @abstractmethod
    def dimensions(self, config: ModelConfig) -> Dimensions:
        """Dimensions of the model, from which its parameter count, memory and operations follow."""

    def preset(self, name: str) -> ModelConfig:
        """Configuration of a preset."""
        if name not in self.presets:
            names = ", ".join(self.presets)
            raise ConfigError(
                [Problem("model.preset", f"{name!r} is not a preset of {self.name}", hint=f"known: {names}")]
            )
        return self.presets[name].config


_ENTRY_POINTS = "nxtrain.models"
"""Entry point group under which packages register model families."""


def family_names() -> list[str]:
    """Names of the installed families."""
    return sorted({entry.name for entry in entry_points(group=_ENTRY_POINTS)})


@cache
def find_family(name: str) -> ModelFamily:
    """Load the installed model family with this name. Packages are searched once per process."""
    families = {entry.name: entry for entry in entry_points(group=_ENTRY_POINTS)}
    if name not in families:
        names = ", ".join(sorted(families)) or "none"
        raise ConfigError(
            [Problem("model.family", f"no model family {name!r} is installed", hint=f"installed: {names}")]
        )
    return cast(ModelFamily, families[name].load())
