"""Dimensions of a decoder, without torch: sizes, parameters with their sharding, and operations.

Modules of `nxtrain.nn` make their parameters from the same segments and specs, and plans count them.
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
    """Feed-forwards of a block of which a router chooses some for each token.

    Args:
        num_experts: Gated feed-forwards of a block.
        experts_per_token: Experts that a token passes through.
        expert_size: Width inside of an expert.
        aux_loss_coef: Factor of the loss that balances the load of the experts.
        is_normalized: The weights of a token's experts add up to 1; otherwise they are probabilities over all experts.
        module: Name of the feed-forward in a block.
        gate, up, down: Names of an expert's matrices.
        router: Name of the router in the feed-forward.
        biases: Router and experts have biases, and files stack the matrices of all experts, gate and values in turn.
        limit: Gate and values are clamped to it, and one is added to the values; None: the unit is silu(gate) * up.
        alpha: Factor inside of the sigmoid of a clamped gate.
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
        """Matrices of some experts that project their input, gate and values in turn."""
        names = (f"{expert}.{matrix}" for expert, matrix in product(experts, (self.gate, self.up)))
        return tuple(Segment(name, self.expert_size) for name in names)

    def specs(self, hidden_size: int, experts: range) -> dict[str, ShardSpec]:
        """Sharding of the matrices of some experts, by their names inside the feed-forward.

        The rows of an expert in the first matrix are adjacent, and so are the columns of an expert in the second.
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
        full_period: Of so many layers, the queries of the last see all tokens before them; 0: no such layers.
        out_bias: The projection back from the heads has a bias.
        sinks: Each query head has a score without a key in its softmax.
        mixture: Experts of the blocks; None: every block has one feed-forward.
        dense_layers: Blocks without experts, in a model whose other blocks have experts.
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
        """Dimensions of a model in which no block has experts."""
        return replace(self, mixture=None, dense_layers=())

    @property
    def active_width(self) -> int:
        """Width inside of the feed-forwards that a token passes through in one block."""
        if self.mixture is None:
            return self.intermediate_size
        return self.mixture.experts_per_token * self.mixture.expert_size

    @cached_property
    def column_params(self) -> int:
        """Entries of the matrices that a token passes through in one block, and whose outputs are sharded over tp."""
        attention = self.head_size * (self.num_heads + 2 * self.num_kv_heads)
        parts = 2 if self.gated else 1
        return self.hidden_size * (attention + parts * self.active_width)

    @cached_property
    def block_matmul_params(self) -> int:
        """Entries of the matrices that a token passes through in one block, that of the router included."""
        num_experts = 0 if self.mixture is None else self.mixture.num_experts
        others = self.hidden_size * (self.head_size * self.num_heads + self.active_width + num_experts)
        return self.column_params + others

    @cached_property
    def num_params(self) -> int:
        """Parameters of the whole model, a tied embedding counted once."""
        block, dense = (_num_entries(block_specs(part, 1)) for part in (self, self.dense))
        rest = _num_entries(rest_specs(self, first=True, last=True))
        num_dense = len(self.dense_layers)
        return (self.num_layers - num_dense) * block + num_dense * dense + rest

    @cached_property
    def num_active_params(self) -> int:
        """Parameters of the whole model without the experts that a token does not pass through."""
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
        """Number of layers whose queries see all tokens before them in spite of the window."""
        return sum(number for window, number in self.windows(range(self.num_layers)) if window is None and self.window)

    def windows(self, layers: range) -> list[tuple[int | None, int]]:
        """Windows of some layers, None for all tokens before a query, and the number of layers with each."""
        num_full = len(layers)
        if self.window is not None:
            num_full = max(0, min(layers.stop, self.full_layers) - layers.start)
            if self.full_period:
                num_full += layers.stop // self.full_period - layers.start // self.full_period
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

        In a model with experts, the block is one that has them. A forward pass has two operations for each entry of a
        matrix. Attention counts as the mean of all blocks, some of which may have windows. Biases and norms count as
        nothing.

        Source: Korthikanti et al. 2022 (arXiv:2205.05198) appendix A, with the causal half of the attention.
        """
        block = 2 * self.block_matmul_params + self._all_attention_flops(seq_len) // self.num_layers
        return LayerCosts(0, block, 2 * self.vocab_size * self.hidden_size)

    def flops_per_token(self, seq_len: int) -> int:
        """Operations of forward and backward for one token, causal attention counted once.

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


def expert_adapter_specs(weight: ShardSpec, r: int) -> tuple[ShardSpec, ShardSpec]:
    """Sharding of the matrices A and B of the adapters of one matrix of each expert.

    Gate and values of an expert share an A, since PEFT adapts the stacked parameter of both. Every tensor parallel rank
    has a partial sum of the gradient of a replicated matrix.

    Args:
        weight: Sharding of the matrices, as of `MoeShape.specs`.
        r: Rank of each adapter.
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
    """True for the weight of a linear layer, which may be quantized; experts and routers are not linear layers."""
    return spec.dim is not None and len(spec.shape) > 1 and not spec.expert


@lru_cache(maxsize=1024)
def block_specs(
    dimensions: Dimensions, tp: int, *, fused_qkv: bool = True, fused_gate_up: bool = True
) -> dict[str, ShardSpec]:
    """Sharding of the parameters of one block, by their names inside the block, in the order of the model.

    In a model with experts, the block is one that has them; `dimensions.dense` has the specs of the others.
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
