"""Contract of a model family: the interface of every architecture, and discovery of installed families.

A family is found by its entry point in the group `nxtrain.models`; nothing in nxtrain imports a family. Everything in
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
    """Shape of a decoder, under Hugging Face's names; families add further keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    vocab_size: int
    """Entries of the vocabulary, unpadded."""
    hidden_size: int
    """Width of the residual stream."""
    num_hidden_layers: int
    """Transformer blocks."""
    tie_word_embeddings: bool = False
    """The output projection is the embedding matrix itself."""
    max_position_embeddings: int = 2048
    """Tokens of the longest sequence."""

    @property
    def longest_sequence(self) -> tuple[str, int]:
        """Key that limits the tokens of a sequence, and the number."""
        return "max_position_embeddings", self.max_position_embeddings


@dataclass(frozen=True)
class Preset:
    """A published model shape, and the source of the publication."""

    config: ModelConfig
    source: str


@dataclass(frozen=True)
class BuildContext:
    """Arguments of a model's construction; model code itself never asks for a device or a rank.

    Args:
        fused_qkv, fused_gate_up: Projections that share an input are one matrix.
        scaled_init: Projections into the residual stream start at std / sqrt(2 * layers).
        decay_norms: Weight decay applies to the norms too, including norms of heads.
        parts: Parts of the model that are built, ascending; empty: the whole model.
        context_parallel: Ranks that share the positions of a sequence; None: each rank has whole sequences.
        router_losses: Losses of the routers; None: none.
        moe_capacity_factor: Slots that an expert computes, relative to an even load; None: all.
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
    """Interface of a built model for training and generation, in addition to the interface of `torch.nn.Module`."""

    context_parallel: ContextAttention | None
    """Ranks that share the positions of a sequence, which the builder of a model sets."""

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """Repeated submodules, in order of use; each is gathered as one unit when parameters are sharded."""
        ...

    @property
    def routing(self) -> Tensor | None:
        """Losses of the routers in the last loss of a training step, (2,) float32; None without experts.

        Load balancing loss and z-loss, times the targets that count. Each rank of dp x cp has its part of a sum.
        """
        ...

    def count_loads(self, loads: Tensor) -> None:
        """Add the loads of the experts to a tensor, in every forward pass of training.

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
        """Compute one of the model's parts on a pipeline stage.

        Args:
            state: (B, S) tokens for the first part. For others (S/tp, B, D), and in a model with E experts the routing
                of all blocks before the part, (2E + 4,) float32.
            targets: (B, S) for the last part.
            starts, counted: As for `loss`, in every part.

        Returns:
            The loss of the last part, as of `loss`; the state of the next part for others.
        """
        ...

    def loss(
        self, inputs: Tensor, targets: Tensor, starts: Tensor | None = None, counted: Tensor | None = None
    ) -> Tensor:
        """Sum of the tokens' cross entropies, for a model that was built whole: (B, S), (B, S) to () float32.

        Layers with losses of tokens give (S, B) float32 instead: see `VocabHead`.

        Args:
            starts: (B, S) first position of each position's document, for attention and positions inside of
                documents; None: a row is one document.
            counted: (S/tp, B) float32, 1 for a token that the routers' losses count and 0 for another; None: all count.
        """
        ...

    def logits(self, inputs: Tensor, starts: Tensor | None = None) -> Tensor:
        """Logits of a whole model on every rank: (B, S) to (B, S, vocab_size) float32; not differentiable."""
        ...


class ModelFamily(ABC):
    """One architecture: its configuration, presets, module, Hugging Face form and arithmetic."""

    name: str
    config_type: type[ModelConfig]
    presets: Mapping[str, Preset]

    @abstractmethod
    def check(self, config: ModelConfig, *, tp: int, seq_len: int) -> list[Problem]:
        """All problems of a shape at these degrees; keys are `model.config.*` or `parallel.*`."""

    @abstractmethod
    def build(self, config: ModelConfig, context: BuildContext) -> nn.Module:
        """Make the module, a `CausalLM`, on the meta device; unfused parameters have Hugging Face's names."""

    @abstractmethod
    def from_hf(self, hf_config: Mapping[str, Any]) -> ModelConfig:
        """Read a Hugging Face `config.json`; a ConfigError for anything that this family does not compute."""

    @abstractmethod
    def to_hf(self, config: ModelConfig, dtype: str) -> dict[str, Any]:
        """Write a Hugging Face `config.json`; `dtype` is torch's name of the weights' type."""

    @abstractmethod
    def dimensions(self, config: ModelConfig) -> Dimensions:
        """Dimensions of the model, from which its parameters, memory and operations follow."""

    def preset(self, name: str) -> ModelConfig:
        """Configuration of a preset."""
        if name not in self.presets:
            names = ", ".join(self.presets)
            raise ConfigError(
                [Problem("model.preset", f"{name!r} is no preset of {self.name}", hint=f"known: {names}")]
            )
        return self.presets[name].config


_ENTRY_POINTS = "nxtrain.models"
"""Group of entry points under which packages offer families."""


def family_names() -> list[str]:
    """Names of the installed families."""
    return sorted({entry.name for entry in entry_points(group=_ENTRY_POINTS)})


@cache
def find_family(name: str) -> ModelFamily:
    """Load the family that is installed under this name; packages are searched once per process."""
    families = {entry.name: entry for entry in entry_points(group=_ENTRY_POINTS)}
    if name not in families:
        names = ", ".join(sorted(families)) or "none"
        raise ConfigError(
            [Problem("model.family", f"no model family {name!r} is installed", hint=f"installed: {names}")]
        )
    return cast(ModelFamily, families[name].load())
