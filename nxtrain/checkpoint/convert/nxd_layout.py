"""Sharding of NeuronX Distributed's Llama: parameter names, and the entries of each tensor on each rank.

A rank has the gate and up projections in one matrix, and q, k and v in three matrices or one. If tp exceeds the number
of key/value heads, these heads are replicated. Each replica is on a rank with query heads of its group. On trn1 the
heads alternate over ranks (0 1 0 1). On trn2 replicas are adjacent (0 0 1 1), and the query heads keep their order if a
rank has one head.

Source: `GQAQKVColumnParallelLinear` and `arrange_kv_groups` of neuronx-distributed 0.18; its example
`modeling_llama_nxd.py`; `create_partitions` for the split over pp.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from nxtrain.common.errors import ConfigError, Problem
from nxtrain.common.sharding import Segment, ShardBox

Qkv = Literal["separate", "grouped", "fused"]
"""Storage of q, k and v: separate projections, NxD's grouped query module, or this module with one fused matrix."""

Platform = Literal["trn1", "trn2"]

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
NORM = "model.norm.weight"

_ATTENTION: dict[Qkv, tuple[str, ...]] = {
    "separate": ("q_proj.weight", "k_proj.weight", "v_proj.weight"),
    "grouped": ("qkv_proj.weight_q", "qkv_proj.weight_k", "qkv_proj.weight_v"),
    "fused": ("qkv_proj.weight_qkv",),
}
_SOURCES = {
    "qkv_proj.weight_qkv": ("q_proj", "k_proj", "v_proj"),
    "qkv_proj.weight": ("q_proj", "k_proj", "v_proj"),
    "qkv_proj.weight_q": ("q_proj",),
    "qkv_proj.weight_k": ("k_proj",),
    "qkv_proj.weight_v": ("v_proj",),
    "gate_up_proj.weight": ("gate_proj", "up_proj"),
}
"""Projections of nxtrain that an NxD parameter concatenates, by NxD's module and parameter name."""


@dataclass(frozen=True)
class Param:
    """Parameter of one NxD rank: its name, its local shape, and its part of each global tensor."""

    name: str
    shape: tuple[int, ...]
    blocks: tuple[tuple[str, ShardBox], ...]

    def rows(self, rank: int, size: int) -> Param:
        """Return the rows of a ZeRO-1 rank: equally many on each rank, the last padded with zeros."""
        width = -(-self.shape[0] // size)
        first = rank * width
        clipped = []
        for name, block in self.blocks:
            begin = block.local_offsets[0]
            low, high = max(begin, first), min(begin + block.sizes[0], first + width)
            if low < high:
                offsets = (block.offsets[0] + low - begin, *block.offsets[1:])
                sizes, local = (high - low, *block.sizes[1:]), (low - first, *block.local_offsets[1:])
                clipped.append((name, replace(block, offsets=offsets, sizes=sizes, local_offsets=local)))
        return replace(self, shape=(width, *self.shape[1:]), blocks=tuple(clipped))


@dataclass(frozen=True)
class NxdLayout:
    """Sharding of every tensor of a Llama model over NxD's ranks.

    Args:
        shapes: Unsharded shape of every tensor, by global name.
        config: Hugging Face configuration of the model.
        tp, pp: Tensor and pipeline parallel degrees.
        copies: Replicas of each key/value head; NxD's kv_size_multiplier or kv_shared_group_size.
        qkv: Storage of q, k and v.
        platform: Platform whose order of replicated heads is used.
    """

    shapes: Mapping[str, tuple[int, ...]]
    config: Mapping[str, Any]
    tp: int = 1
    pp: int = 1
    copies: int = 1
    qkv: Qkv = "separate"
    platform: Platform = "trn1"

    def __post_init__(self) -> None:
        """Raise a ConfigError for a model or parallel degrees that NxD cannot represent."""
        problems = list(self._problems())
        if problems:
            raise ConfigError(
                [Problem("", f"NeuronX Distributed does not support this: {problem}") for problem in problems]
            )

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return int(self.config["num_attention_heads"])

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads."""
        return int(self.config.get("num_key_value_heads") or self.heads)

    @property
    def head_size(self) -> int:
        """Size of an attention head."""
        return int(self.config.get("head_dim") or self.config["hidden_size"] // self.heads)

    @property
    def is_tied(self) -> bool:
        """True if the output head shares the matrix of the embedding."""
        return HEAD not in self.shapes

    def stage(self, pp_rank: int) -> list[str]:
        """Names of the parameters of a pipeline stage, in the order of NxD's optimizer."""
        num_blocks = int(self.config["num_hidden_layers"])
        sizes = [num_blocks // self.pp + (stage >= self.pp - num_blocks % self.pp) for stage in range(self.pp)]
        first = sum(sizes[:pp_rank])
        names = []
        if pp_rank == 0:
            names.append(EMBEDDING)
        for block in range(first, first + sizes[pp_rank]):
            attention = (f"self_attn.{name}" for name in (*_ATTENTION[self.qkv], "o_proj.weight"))
            mlp = ("mlp.gate_up_proj.weight", "mlp.down_proj.weight")
            norms = ("input_layernorm.weight", "post_attention_layernorm.weight")
            names += [f"model.layers.{block}.{name}" for name in (*attention, *mlp, *norms)]
        if pp_rank == self.pp - 1:
            names += [NORM, HEAD]
        return names

    def param(self, name: str, tp_rank: int) -> Param:
        """Return an NxD parameter by its name and tensor parallel rank.

        Raises:
            KeyError: The model has no such parameter.
        """
        block, module, leaf = ("", *name.rsplit(".", 2))[-3:]
        sources = _SOURCES.get(f"{module}.{leaf}", (module,))
        names = [f"{block}.{source}.weight".removeprefix(".") for source in sources]
        if name == HEAD and self.is_tied:
            names = [EMBEDDING]
        placed: list[tuple[str, ShardBox]] = []
        start, dim = 0, int(module in ("o_proj", "down_proj"))
        for source, whole in zip(sources, names, strict=True):
            shape = self.shapes[whole]
            for first, length, copy, copies in self._runs(source, shape, dim, tp_rank):
                segment = Segment("", shape[dim])
                offsets = [0] * len(shape)
                offsets[dim] = first
                sizes = list(shape)
                sizes[dim] = length
                local = [0] * len(shape)
                local[dim] = start
                placed.append((whole, ShardBox(segment, tuple(offsets), tuple(sizes), tuple(local), copy, copies)))
                start += length
        shape = self.shapes[names[0]]
        return Param(name, (*shape[:dim], start, *shape[dim + 1 :]), tuple(placed))

    def _runs(self, source: str, shape: Sequence[int], dim: int, rank: int) -> Iterator[tuple[int, int, int, int]]:
        """Ranges of a rank along the sharded dimension: first entry, length, replica index and number of replicas."""
        if len(shape) == 1:
            yield 0, shape[0], rank, self.tp
        elif source in ("q_proj", "k_proj", "v_proj", "o_proj") and self.copies > 1:
            yield from self._heads(rank, is_kv=source in ("k_proj", "v_proj"))
        else:
            length = shape[dim] // self.tp
            yield rank * length, length, 0, 1

    def _heads(self, rank: int, *, is_kv: bool) -> Iterator[tuple[int, int, int, int]]:
        """Ranges of replicated key/value heads, or of their query heads, on a rank, as `_runs` yields them."""
        num_local = self.kv_heads * self.copies // self.tp
        num_parts = self.tp // self.copies
        if self.platform == "trn1":
            copy, part = divmod(rank, num_parts)
        else:
            part, copy = divmod(rank, self.copies)
        for head in range(part * num_local, (part + 1) * num_local):
            if is_kv:
                yield head * self.head_size, self.head_size, copy, self.copies
            else:
                length = self.heads // (self.kv_heads * self.copies) * self.head_size
                yield (head * self.copies + copy) * length, length, 0, 1

    def _problems(self) -> Iterator[str]:
        if self.heads * self.head_size != self.config["hidden_size"]:
            yield f"{self.heads} heads of size {self.head_size} do not make up hidden_size={self.config['hidden_size']}"
        sizes = {"num_attention_heads": self.heads, "num_key_value_heads x copies": self.kv_heads * self.copies}
        sizes |= {name: int(self.config[name]) for name in ("intermediate_size", "vocab_size")}
        for name, size in sizes.items():
            if size % self.tp:
                yield f"tp={self.tp} does not divide {name}={size}"
        if self.heads % (self.kv_heads * self.copies):
            yield f"{self.copies} copies of {self.kv_heads} K/V heads do not divide {self.heads} query heads"
        if self.copies > 1 and self.qkv == "separate":
            yield f"{self.copies} copies of each K/V head need qkv=grouped or fused"
        if self.tp % self.copies:
            yield f"{self.copies} copies of each K/V head do not divide tp={self.tp}"
        if self.pp > int(self.config["num_hidden_layers"]):
            yield f"pp={self.pp} stages exceed the {self.config['num_hidden_layers']} blocks of the model"


def default_copies(config: Mapping[str, Any], tp: int) -> int:
    """Smallest number of replicas of each key/value head for a tensor parallel degree."""
    kv_heads = int(config.get("num_key_value_heads") or config["num_attention_heads"])
    return math.lcm(kv_heads, tp) // kv_heads
