"""Dimensions of a decoder, without torch: sizes, parameter shapes with their sharding, and operation counts.

Modules of `nxtrain.nn` create their parameters from these shard specs. Memory and time plans count the same specs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product

from nxtrain.common.sharding import Init, Segment, ShardSpec
from nxtrain.common.stages import LayerCosts

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class MoeShape:
    """Shape of the mixture-of-experts feed-forward of a block, in which a router selects some experts for each token.

    Args:
        num_experts: Experts of a block, each a gated feed-forward.
        experts_per_token: Experts to which a token is routed.
        expert_size: Intermediate size of an expert.
        aux_loss_coef: Factor of the loss that balances the load of the experts.
        is_normalized: The router weights of a token's selected experts add up to 1. Otherwise they are softmax
            probabilities over all experts.
        module: Parameter name of the feed-forward in a block.
        gate, up, down: Parameter names of an expert's matrices.
        router: Parameter name of the router in the feed-forward.
        biases: Router and experts have biases. Files stack the matrices of all experts, with gate and up rows
            interleaved.
        limit: Clamp of gate and up in the clamped activation, which also adds one to up. None for silu(gate) * up.
        alpha: Factor inside the sigmoid of the clamped activation.
    """

    num_experts: int
    experts_per_token: int
    expert_size: int
    aux_loss_coef: float = 0.0
    is_normalized: bool = True
    module: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    router: str = "gate"
    biases: bool = False
    limit: float | None = None
    alpha: float = 1.702

    def gate_up_segments(self, experts: range) -> tuple[Segment, ...]:
        """Segments of the fused gate and up matrices of some experts, gate and up alternating by expert."""
        names = (f"{expert}.{matrix}" for expert, matrix in product(experts, (self.gate, self.up)))
        return tuple(Segment(name, self.expert_size) for name in names)

    def specs(self, hidden_size: int, experts: range) -> dict[str, ShardSpec]:
        """Shard specs of the matrices of some experts, by parameter name inside the feed-forward.

        An expert's rows in the gate-up matrix are adjacent. An expert's columns in the down matrix are adjacent.
        """
        gate_up = self.gate_up_segments(experts)
        down = tuple(Segment(f"{expert}.{self.down}", self.expert_size) for expert in experts)
        width = len(experts) * self.expert_size
        specs = {
            "experts.gate_up_proj.weight": replace(ShardSpec.column(hidden_size, gate_up), expert=True),
            "experts.down_proj.weight": ShardSpec((hidden_size, width), dim=1, segments=down, expert=True),
        }
        if self.biases:
            outputs = tuple(replace(segment, size=hidden_size) for segment in down)
            of_down = ShardSpec((len(outputs) * hidden_size,), segments=outputs, partial_gradient=True, expert=True)
            specs["experts.gate_up_proj.bias"] = replace(specs["experts.gate_up_proj.weight"].of_bias(), expert=True)
            specs["experts.down_proj.bias"] = replace(of_down, decay=False, init=Init("zeros"))
        return specs


@dataclass(frozen=True)
class Dimensions:
    """Dimensions of a decoder, from which its parameter count, memory and operations follow.

    Args:
        vocab_size, hidden_size, num_layers, num_heads, num_kv_heads, head_size, intermediate_size: Sizes of the whole,
            unsharded model.
        tied: The output projection shares its matrix with the token embedding.
        gated: The feed-forward is gated, so that it has three matrices instead of two.
        biases: Linear layers and norms have biases.
        positions: Rows of a learned position embedding; 0 without one.
        qkv_bias: The query, key and value projections have biases, even if `biases` is False.
        head_norms: Every query and key head is normalized.
        window: Sliding window of attention in tokens, the query's own included; None if no layer has one.
        full_layers: Number of first layers with full causal attention instead of the sliding window.
        full_period: Every `full_period`-th layer has full causal attention instead of the sliding window; 0 for none.
        out_bias: The output projection of attention has a bias.
        sinks: Each query head has an attention sink, a learned score without a key in its softmax.
        mixture: Mixture of experts of the blocks; None for a dense model.
        dense_layers: Indices of dense blocks in a model whose other blocks have experts.
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
    full_period: int = 0
    out_bias: bool = False
    sinks: bool = False
    mixture: MoeShape | None = None
    dense_layers: tuple[int, ...] = ()

    @cached_property
    def dense(self) -> Dimensions:
        """The same dimensions without experts, so that every block has a dense feed-forward."""
        return replace(self, mixture=None, dense_layers=())

    @property
    def active_width(self) -> int:
        """Sum of the intermediate sizes of the feed-forwards that a token passes through in one block."""
        if self.mixture is None:
            return self.intermediate_size
        return self.mixture.experts_per_token * self.mixture.expert_size

    @cached_property
    def column_params(self) -> int:
        """Entries of the column-parallel matrices of one block that a token passes through.

        These are the matrices for query, key, value, gate and up.
        """
        attention = self.head_size * (self.num_heads + 2 * self.num_kv_heads)
        parts = 2 if self.gated else 1
        return self.hidden_size * (attention + parts * self.active_width)

    @cached_property
    def block_matmul_params(self) -> int:
        """Entries of all matrices of one block that a token passes through, the router included."""
        num_experts = 0 if self.mixture is None else self.mixture.num_experts
        others = self.hidden_size * (self.head_size * self.num_heads + self.active_width + num_experts)
        return self.column_params + others

    @cached_property
    def num_params(self) -> int:
        """Number of parameters of the whole model; a tied embedding counts once."""
        block, dense = (_num_entries(block_specs(part, 1)) for part in (self, self.dense))
        rest = _num_entries(rest_specs(self, first=True, last=True))
        num_dense = len(self.dense_layers)
        return (self.num_layers - num_dense) * block + num_dense * dense + rest

    @cached_property
    def num_active_params(self) -> int:
        """Parameters that one token uses: all of the model except the experts to which the token is not routed."""
        if self.mixture is None:
            return self.num_params
        idle = self.mixture.num_experts - self.mixture.experts_per_token
        num_sparse = self.num_layers - len(self.dense_layers)
        expert = 3 * self.hidden_size * self.mixture.expert_size
        if self.mixture.biases:
            expert += 2 * self.mixture.expert_size + self.hidden_size
        return self.num_params - num_sparse * idle * expert

    @property
    def num_full_layers(self) -> int:
        """Number of layers with full causal attention in a model with a sliding window; 0 without a window."""
        return sum(number for window, number in self.windows(range(self.num_layers)) if window is None and self.window)

    def windows(self, layers: range) -> list[tuple[int | None, int]]:
        """Pairs of attention window and number of layers with that window, for a range of layers.

        The window is None for full causal attention.
        """
        num_full = len(layers)
        if self.window is not None:
            num_full = max(0, min(layers.stop, self.full_layers) - layers.start)
            if self.full_period:
                num_full += layers.stop // self.full_period - layers.start // self.full_period
        kinds = [(None, num_full), (self.window, len(layers) - num_full)]
        return [(window, number) for window, number in kinds if number]

    def attention_flops(self, seq_len: int, window: int | None = None) -> int:
        """Forward operations of causal attention per token and layer, for the two products QK^T and PV.

        A query sees half of the sequence on average. Within a window of W tokens, a query sees W - W^2 / 2S on average.
        """
        seen = seq_len
        if window is not None and window < seq_len:
            seen = (2 * window * seq_len - window**2) // seq_len
        return 2 * self.num_heads * self.head_size * seen

    def layer_costs(self, seq_len: int) -> LayerCosts:
        """Forward operations per token of the embedding (which costs 0), of one block and of the output projection.

        In a model with experts, the block is one with experts. A forward pass has two operations for each matrix entry.
        Attention counts as the mean over all blocks, since some may have windows. Biases and norms count as 0.

        Source: Korthikanti et al. 2022 (arXiv:2205.05198) appendix A, with the causal half of the attention.
        """
        block = 2 * self.block_matmul_params + self._all_attention_flops(seq_len) // self.num_layers
        return LayerCosts(0, block, 2 * self.vocab_size * self.hidden_size)

    def flops_per_token(self, seq_len: int) -> int:
        """Operations of the forward and backward pass of the whole model for one token, with causal attention.

        The backward pass has twice as many operations as the forward pass.
        """
        num_dense = len(self.dense_layers)
        matrices = (self.num_layers - num_dense) * self.block_matmul_params + self.vocab_size * self.hidden_size
        if num_dense:
            matrices += num_dense * self.dense.block_matmul_params
        return 3 * (2 * matrices + self._all_attention_flops(seq_len))

    def _all_attention_flops(self, seq_len: int) -> int:
        total = 0
        for window, number in self.windows(range(self.num_layers)):
            total += number * self.attention_flops(seq_len, window)
        return total


def _num_entries(specs: Mapping[str, ShardSpec]) -> int:
    return sum(math.prod(spec.shape) for spec in specs.values())


def qkv_segments(num_heads: int, num_kv_heads: int, head_size: int, tp: int) -> tuple[Segment, Segment, Segment]:
    """Segments of the fused query, key and value projection.

    If tp exceeds the number of key-value heads, adjacent ranks hold replicas of the same key-value head.
    """
    replicas = max(1, tp // num_kv_heads)
    return (
        Segment("q_proj", num_heads * head_size),
        Segment("k_proj", num_kv_heads * head_size, replicas),
        Segment("v_proj", num_kv_heads * head_size, replicas),
    )


def gate_up_segments(intermediate_size: int) -> tuple[Segment, Segment]:
    """Segments of the fused gate and up projection of a gated feed-forward."""
    return Segment("gate_proj", intermediate_size), Segment("up_proj", intermediate_size)


def adapter_specs(
    weight: ShardSpec, segments: Sequence[Segment], r: int, *, partial_gradient: bool = False
) -> tuple[ShardSpec, ShardSpec]:
    """Shard specs of the LoRA matrices A and B of a linear layer, whose adapters share one input.

    The matrix on the side of the unsharded features is replicated over tp.

    Args:
        weight: Shard spec of the layer's weight.
        segments: Segments of the layer's output that have an adapter.
        r: LoRA rank of each adapter.
        partial_gradient: A rank's gradient of the replicated matrix is a partial sum over tp.
    """
    in_features = weight.shape[1]
    out_features = sum(segment.size for segment in segments)
    if weight.dim == 0:
        ranks = tuple(Segment(segment.name, r) for segment in segments)
        a = ShardSpec((len(ranks) * r, in_features), segments=ranks, partial_gradient=partial_gradient)
        return a, ShardSpec((out_features, r), dim=0, segments=tuple(segments))
    return ShardSpec((r, in_features), dim=1), ShardSpec((out_features, r), partial_gradient=partial_gradient)


def expert_adapter_specs(weight: ShardSpec, r: int) -> tuple[ShardSpec, ShardSpec]:
    """Shard specs of the LoRA matrices A and B for one matrix of each expert.

    Gate and up of an expert share one A, since PEFT adapts the stacked parameter of both. Every tensor parallel rank
    has a partial sum of the gradient of a replicated matrix.

    Args:
        weight: Shard spec of the experts' matrices, as from `MoeShape.specs`.
        r: LoRA rank of each adapter.
    """
    rows, columns = weight.shape
    experts = tuple(dict.fromkeys(segment.name.partition(".")[0] for segment in weight.segments))
    if weight.dim == 0:
        size = rows // (2 * len(experts))
        pairs = product(experts, ("gate_proj", "up_proj"))
        ups = tuple(Segment(f"{expert}.{name}", size) for expert, name in pairs)
        shared = tuple(Segment(f"{expert}.gate_up_proj", r) for expert in experts)
        a = ShardSpec((r * len(shared), columns), segments=shared, partial_gradient=True, expert=True)
        return a, ShardSpec((rows, r), dim=0, segments=ups, expert=True)
    names = [f"{expert}.down_proj" for expert in experts]
    inner = tuple(Segment(name, columns // len(names)) for name in names)
    outer = tuple(Segment(name, rows) for name in names)
    b = ShardSpec((rows * len(names), r), segments=outer, partial_gradient=True, expert=True)
    return ShardSpec((r, columns), dim=1, segments=inner, expert=True), b


def is_matrix(spec: ShardSpec) -> bool:
    """True for the sharded weight of a linear layer, which may be quantized. Experts and routers do not count."""
    return spec.dim is not None and len(spec.shape) > 1 and not spec.expert


@lru_cache(maxsize=1024)
def block_specs(
    dimensions: Dimensions, tp: int, *, fused_qkv: bool = True, fused_gate_up: bool = True
) -> dict[str, ShardSpec]:
    """Shard specs of the parameters of one block, by parameter name inside the block, in the model's order.

    In a model with experts, the block is one with experts. Pass `dimensions.dense` for a dense block.
    """
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
    mixture = dimensions.mixture
    if mixture is None:
        for name, segments in _matrices("gate_up_proj", ups, is_fused=fused_gate_up):
            layers[f"mlp.{name}"] = ShardSpec.column(hidden, segments)
        layers["mlp.down_proj"] = ShardSpec.row(inner, hidden)
    else:
        layers[f"{mixture.module}.{mixture.router}"] = ShardSpec((mixture.num_experts, hidden))
    specs: dict[str, ShardSpec] = {}
    for name, weight in layers.items():
        if dimensions.sinks and name in ("self_attn.q_proj", "self_attn.qkv_proj"):
            specs["self_attn.sinks"] = ShardSpec((dimensions.num_heads,), dim=0)
        specs[f"{name}.weight"] = weight
        is_projection = name.startswith("self_attn.") and weight.dim == 0
        if dimensions.biases or (dimensions.qkv_bias and is_projection):
            specs[f"{name}.bias"] = weight.of_bias() if weight.dim == 0 else ShardSpec(weight.shape[:1])
        if dimensions.out_bias and name == "self_attn.o_proj":
            specs[f"{name}.bias"] = ShardSpec(weight.shape[:1])
        if mixture is not None and mixture.biases and name == f"{mixture.module}.{mixture.router}":
            specs[f"{name}.bias"] = ShardSpec(weight.shape[:1])
    if mixture is not None:
        own = mixture.specs(hidden, range(mixture.num_experts))
        # The matrices of the experts that project their input with their biases, then those that project their output.
        names = sorted(own, key=lambda name: ("down_proj" in name, name.endswith(".bias")))
        specs |= {f"{mixture.module}.{name}": own[name] for name in names}
    return specs


def _matrices(name: str, segments: tuple[Segment, ...], *, is_fused: bool) -> Iterator[tuple[str, tuple[Segment, ...]]]:
    """Names and segments of the projections of one input: one fused matrix, or one matrix for each segment."""
    if is_fused:
        yield name, segments
    else:
        for segment in segments:
            yield segment.name, (segment,)


def rest_specs(dimensions: Dimensions, *, first: bool, last: bool) -> dict[str, ShardSpec]:
    """Shard specs of a pipeline stage's parameters outside of blocks, by parameter name.

    The first stage has the embedding, and the last stage has the final norm and the output projection. A rank that is
    both first and last holds a tied matrix once.
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
