"""Dimensions of a decoder, without torch: sizes, parameters with their sharding, and operations.

Modules of `nxtrain.nn` make their parameters from the same segments and specs, and plans count them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from nxtrain.common.sharding import Segment, ShardSpec
from nxtrain.common.stages import LayerCosts

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Dimensions:
    """Dimensions of a decoder, from which its memory and its arithmetic follow.

    Args:
        vocab_size, hidden_size, num_layers, num_heads, num_kv_heads, head_size, intermediate_size: Whole sizes.
        tied: The output projection is the embedding.
        gated: The feed-forward has a gate next to its first matrix.
        biases: Linear layers and norms have biases.
        positions: Rows of a learned position embedding; 0: none.
        qkv_bias: The projections to queries, keys and values have biases, and other layers may have none.
        head_norms: Every head of the queries and keys is normalized.
        window: Most tokens that a query of some layer sees, its own among them; None: no layer has a limit.
        full_layers: First layers, whose queries see all tokens before them in spite of the window.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    tied: bool = False
    gated: bool = True
    biases: bool = False
    positions: int = 0
    qkv_bias: bool = False
    head_norms: bool = False
    window: int | None = None
    full_layers: int = 0

    @cached_property
    def column_params(self) -> int:
        """Entries of the matrices of one block whose outputs are sharded over tp."""
        attention = self.head_size * (self.num_heads + 2 * self.num_kv_heads)
        parts = 2 if self.gated else 1
        return self.hidden_size * (attention + parts * self.intermediate_size)

    @cached_property
    def block_matmul_params(self) -> int:
        """Entries of the matrices of one block."""
        row_params = self.hidden_size * (self.head_size * self.num_heads + self.intermediate_size)
        return self.column_params + row_params

    @cached_property
    def num_params(self) -> int:
        """Parameters of the whole model, a tied embedding counted once."""
        block = sum(math.prod(spec.shape) for spec in block_specs(self, 1).values())
        rest = sum(math.prod(spec.shape) for spec in rest_specs(self, first=True, last=True).values())
        return self.num_layers * block + rest

    def windows(self, layers: range) -> list[tuple[int | None, int]]:
        """Windows of some layers, None for all tokens before a query, and the number of layers with each."""
        num_full = len(layers)
        if self.window is not None:
            num_full = max(0, min(layers.stop, self.full_layers) - layers.start)
        kinds = [(None, num_full), (self.window, len(layers) - num_full)]
        return [(window, number) for window, number in kinds if number]

    def attention_flops(self, seq_len: int, window: int | None = None) -> int:
        """Operations of the two products of causal attention per token and layer, forward.

        A query sees half of the sequence on average. Within a window of W tokens, a query sees W - W^2 / 2S.
        """
        seen = seq_len
        if window is not None and window < seq_len:
            seen = (2 * window * seq_len - window**2) // seq_len
        return 2 * self.num_heads * self.head_size * seen

    def layer_costs(self, seq_len: int) -> LayerCosts:
        """Operations of the forward pass of each layer per token; an embedding lookup costs nothing.

        A forward pass has two operations for each entry of a matrix. Attention counts as the mean of all blocks, some
        of which may have windows. Biases and norms count as nothing.

        Source: Korthikanti et al. 2022 (arXiv:2205.05198) appendix A, with the causal half of the attention.
        """
        block = 2 * self.block_matmul_params + self._all_attention_flops(seq_len) // self.num_layers
        return LayerCosts(0, block, 2 * self.vocab_size * self.hidden_size)

    def flops_per_token(self, seq_len: int) -> int:
        """Operations of forward and backward for one token, causal attention counted once.

        The backward pass has twice as many operations as the forward pass.
        """
        matrices = self.num_layers * self.block_matmul_params + self.vocab_size * self.hidden_size
        return 3 * (2 * matrices + self._all_attention_flops(seq_len))

    def _all_attention_flops(self, seq_len: int) -> int:
        total = 0
        for window, number in self.windows(range(self.num_layers)):
            total += number * self.attention_flops(seq_len, window)
        return total


def qkv_segments(num_heads: int, num_kv_heads: int, head_size: int, tp: int) -> tuple[Segment, Segment, Segment]:
    """Projections to queries, keys and values; when tp exceeds the K/V heads, adjacent ranks hold the same head."""
    replicas = max(1, tp // num_kv_heads)
    return (
        Segment("q_proj", num_heads * head_size),
        Segment("k_proj", num_kv_heads * head_size, replicas),
        Segment("v_proj", num_kv_heads * head_size, replicas),
    )


def gate_up_segments(intermediate_size: int) -> tuple[Segment, Segment]:
    """Projections to the gate, and to the values that the gate multiplies."""
    return Segment("gate_proj", intermediate_size), Segment("up_proj", intermediate_size)


def adapter_specs(
    weight: ShardSpec, segments: Sequence[Segment], r: int, *, partial_gradient: bool = False
) -> tuple[ShardSpec, ShardSpec]:
    """Sharding of the matrices A and B of a linear layer's adapters, which share their input.

    The matrix on the side of the unsharded features is replicated over tp.

    Args:
        segments: Outputs with an adapter.
        partial_gradient: A rank's gradient of a replicated matrix is a partial sum.
    """
    in_features = weight.shape[1]
    out_features = sum(segment.size for segment in segments)
    if weight.dim == 0:
        ranks = tuple(Segment(segment.name, r) for segment in segments)
        a = ShardSpec((len(ranks) * r, in_features), segments=ranks, partial_gradient=partial_gradient)
        return a, ShardSpec((out_features, r), dim=0, segments=tuple(segments))
    return ShardSpec((r, in_features), dim=1), ShardSpec((out_features, r), partial_gradient=partial_gradient)


def is_matrix(spec: ShardSpec) -> bool:
    """True for the weight of a linear layer, which may be quantized."""
    return len(spec.shape) > 1


@lru_cache(maxsize=1024)
def block_specs(
    dimensions: Dimensions, tp: int, *, fused_qkv: bool = True, fused_gate_up: bool = True
) -> dict[str, ShardSpec]:
    """Sharding of the parameters of one block, by their names inside the block, in the order of the model."""
    hidden, inner = dimensions.hidden_size, dimensions.intermediate_size
    width = dimensions.head_size
    norm, head_norm = ShardSpec((hidden,)), ShardSpec((width,))
    qkv = qkv_segments(dimensions.num_heads, dimensions.num_kv_heads, width, tp)
    ups: tuple[Segment, ...] = gate_up_segments(inner)
    if not dimensions.gated:
        ups = ups[1:]
    layers = {"input_layernorm": norm}
    for name, segments in _matrices("qkv_proj", qkv, is_fused=fused_qkv):
        layers[f"self_attn.{name}"] = ShardSpec.column(hidden, segments)
    if dimensions.head_norms:
        layers |= {"self_attn.q_norm": head_norm, "self_attn.k_norm": head_norm}
    layers["self_attn.o_proj"] = ShardSpec.row(dimensions.num_heads * width, hidden)
    layers["post_attention_layernorm"] = norm
    for name, segments in _matrices("gate_up_proj", ups, is_fused=fused_gate_up):
        layers[f"mlp.{name}"] = ShardSpec.column(hidden, segments)
    layers["mlp.down_proj"] = ShardSpec.row(inner, hidden)
    specs: dict[str, ShardSpec] = {}
    for name, weight in layers.items():
        specs[f"{name}.weight"] = weight
        is_projection = name.startswith("self_attn.") and weight.dim == 0
        if dimensions.biases or (dimensions.qkv_bias and is_projection):
            specs[f"{name}.bias"] = weight.of_bias() if weight.dim == 0 else ShardSpec(weight.shape[:1])
    return specs


def _matrices(name: str, segments: tuple[Segment, ...], *, is_fused: bool) -> Iterator[tuple[str, tuple[Segment, ...]]]:
    """Names and segments of the matrices that project one input: one fused matrix, or a matrix for each segment."""
    if is_fused:
        yield name, segments
    else:
        for segment in segments:
            yield segment.name, (segment,)


def rest_specs(dimensions: Dimensions, *, first: bool, last: bool) -> dict[str, ShardSpec]:
    """Sharding of a stage's parameters outside of blocks, by name; a rank with both tied parameters has only one.

    The first stage has the embedding, the last the output projection.
    """
    hidden, tied = dimensions.hidden_size, dimensions.tied
    specs: dict[str, ShardSpec] = {}
    if first:
        specs[EMBEDDING] = ShardSpec.vocab(dimensions.vocab_size, hidden)
        if dimensions.positions:
            specs["model.embed_positions.weight"] = ShardSpec((dimensions.positions, hidden))
    if last:
        specs["model.norm.weight"] = ShardSpec((hidden,))
        if dimensions.biases:
            specs["model.norm.bias"] = ShardSpec((hidden,))
    if last and not (tied and first):
        specs[HEAD] = ShardSpec.vocab(dimensions.vocab_size, hidden, tied_to=EMBEDDING if tied else None)
    return specs
