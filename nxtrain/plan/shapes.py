"""Parameters of a pipeline stage with their sharding, from the dimensions of a decoder and without torch.

The sizes mirror `nn/attention.py`, `nn/mlp.py`, `nn/norm.py`, `parallel/embedding.py`, `parallel/loss.py` and
`models/decoder/model.py`. They use the same `ShardSpec`, which pads vocabularies and replicates K/V heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from nxtrain.common.family import Dimensions
from nxtrain.common.mesh import Axis
from nxtrain.common.sharding import Segment, ShardSpec
from nxtrain.common.stages import LayerCosts, StagePart, split_layers, split_layers_at


@dataclass(frozen=True)
class Entries:
    """Number of entries of some parameters.

    Args:
        local: Entries of a tensor parallel rank.
        rows: Entries of the same that the first of the ranks sharing training state holds, padding included.
        largest: Local entries of the largest parameter.
        padded: Local entries of the parameters whose rows these ranks cannot share evenly.
    """

    local: int
    rows: int
    largest: int
    padded: int = 0


@lru_cache(maxsize=1024)
def axis_of(size: int) -> Axis:
    """Axis of a number of ranks, of which this is the first, which holds the most."""
    return Axis("tp", 0, (tuple(range(size)),))


@lru_cache(maxsize=65_536)
def _spec_entries(spec: ShardSpec, tp: int, shard: int) -> tuple[int, int]:
    shape = spec.local_shape(axis_of(tp))
    return math.prod(shape), -(-shape[0] // shard) * math.prod(shape[1:])


def block_entries(specs: Mapping[str, ShardSpec], tp: int, shard: int) -> Entries:
    """Entries of parameters: `ShardSpec.local_shape` over tp, and `row_cut` of its first dimension over `shard`."""
    local = rows = largest = padded = 0
    for spec in specs.values():
        own_local, own_rows = _spec_entries(spec, tp, shard)
        local, rows, largest = local + own_local, rows + own_rows, max(largest, own_local)
        padded += own_local if own_rows * shard > own_local else 0
    return Entries(local, rows, largest, padded)


@lru_cache(maxsize=1024)
def block_specs(
    decoder: Dimensions, tp: int, *, fused_qkv: bool = True, fused_gate_up: bool = True
) -> dict[str, ShardSpec]:
    """Parameters of one block."""
    hidden, inner, width = decoder.hidden_size, decoder.intermediate_size, decoder.head_size
    replicas = max(1, tp // decoder.num_kv_heads)
    segments = (
        Segment("q_proj", decoder.num_heads * width),
        Segment("k_proj", decoder.num_kv_heads * width, replicas),
        Segment("v_proj", decoder.num_kv_heads * width, replicas),
    )
    ups = tuple(Segment(name, inner) for name in (("gate_proj", "up_proj") if decoder.gated else ("up_proj",)))
    specs = {"input_layernorm": ShardSpec((hidden,))}
    specs |= _columns("qkv_proj", hidden, segments, fused=fused_qkv)
    specs["o_proj"] = ShardSpec((hidden, decoder.num_heads * width), dim=1)
    specs["post_attention_layernorm"] = ShardSpec((hidden,))
    specs |= _columns("gate_up_proj", hidden, ups, fused=fused_gate_up)
    specs["down_proj"] = ShardSpec((hidden, inner), dim=1)
    if decoder.head_norms:
        specs |= {"q_norm": ShardSpec((width,)), "k_norm": ShardSpec((width,))}
    if decoder.qkv_bias:
        return specs | _biases(_columns("qkv_proj", hidden, segments, fused=fused_qkv))
    return specs | (_biases(specs) if decoder.biases else {})


def _columns(name: str, inputs: int, segments: Sequence[Segment], *, fused: bool) -> dict[str, ShardSpec]:
    if fused:
        return {name: ShardSpec((sum(s.size for s in segments), inputs), dim=0, segments=tuple(segments))}
    return {s.name: ShardSpec((s.size, inputs), dim=0, segments=(s,)) for s in segments}


def _biases(specs: Mapping[str, ShardSpec]) -> dict[str, ShardSpec]:
    """Biases of linear layers and norms; a row layer's is whole on every rank."""
    return {
        f"{name}.bias": ShardSpec((spec.shape[0],), spec.dim if spec.dim == 0 else None, spec.segments)
        if spec.dim == 0
        else ShardSpec((spec.shape[0],))
        for name, spec in specs.items()
    }


def rest_specs(decoder: Dimensions, *, first: bool, last: bool) -> dict[str, ShardSpec]:
    """Parameters of a rank's stage outside its blocks; a tied embedding is one parameter where one rank has both."""
    table = ShardSpec((decoder.vocab_size, decoder.hidden_size), dim=0)
    specs: dict[str, ShardSpec] = {}
    if first:
        specs["embed_tokens"] = table
        if decoder.positions:
            specs["positions"] = ShardSpec((decoder.positions, decoder.hidden_size))
    if last:
        specs["norm"] = ShardSpec((decoder.hidden_size,))
        if decoder.biases:
            specs["norm.bias"] = ShardSpec((decoder.hidden_size,))
        if not (decoder.tied and first):
            specs["lm_head"] = table
    return specs


def costs(decoder: Dimensions, seq_len: int) -> LayerCosts:
    """Operations of the forward pass of each layer per token, as `ModelFamily.layer_costs`; attention is causal."""
    attention = decoder.num_heads * decoder.head_size * seq_len
    return LayerCosts(0, 2 * (block_matmul_params(decoder) + attention), 2 * decoder.vocab_size * decoder.hidden_size)


def block_matmul_params(decoder: Dimensions) -> int:
    """Entries of the matrices of one block."""
    attention = 2 * decoder.hidden_size * decoder.head_size * (decoder.num_heads + decoder.num_kv_heads)
    return attention + (3 if decoder.gated else 2) * decoder.hidden_size * decoder.intermediate_size


def column_params(decoder: Dimensions) -> int:
    """Entries of the matrices of one block whose outputs are sharded over tp."""
    attention = decoder.head_size * (decoder.num_heads + 2 * decoder.num_kv_heads)
    return decoder.hidden_size * (attention + (2 if decoder.gated else 1) * decoder.intermediate_size)


def flops_per_token(decoder: Dimensions, seq_len: int) -> int:
    """Operations of forward and backward for one token, as `ModelFamily.flops_per_token`; attention is causal."""
    per_token = costs(decoder, seq_len)
    return 3 * (decoder.num_layers * per_token.block + per_token.head)


def num_params(decoder: Dimensions) -> int:
    """Parameters of the whole model, a tied embedding counted once."""
    return stage_entries(Stage(decoder, (decoder.num_layers,), first=True, last=True), 1, 1).local


@lru_cache(maxsize=1024)
def stage_parts(
    decoder: Dimensions, seq_len: int, pp: int, virtual_pp: int, cuts: tuple[int, ...] = ()
) -> list[tuple[StagePart, ...]]:
    """Parts of every pipeline rank, as `train/build.py` deals them."""
    if cuts:
        parts = split_layers_at(decoder.num_layers, cuts)
    else:
        parts = split_layers(decoder.num_layers, pp * virtual_pp, costs(decoder, seq_len))
    return [parts[rank::pp] for rank in range(pp)]


@dataclass(frozen=True)
class Stage:
    """Kind of a pipeline rank's stage.

    Args:
        decoder: Dimensions of the model.
        blocks: Number of blocks of each chunk.
        first, last: The rank has the embedding, and the output projection.
        fused_qkv, fused_gate_up: As in `[model]`.
    """

    decoder: Dimensions
    blocks: tuple[int, ...]
    first: bool
    last: bool
    fused_qkv: bool = True
    fused_gate_up: bool = True


@lru_cache(maxsize=1024)
def stage_kinds(
    decoder: Dimensions,
    seq_len: int,
    pp: int,
    virtual_pp: int,
    cuts: tuple[int, ...],
    fused_qkv: bool,
    fused_gate_up: bool,
) -> tuple[tuple[Stage, ...], tuple[int, ...]]:
    """Kind of every pipeline rank's stage, and the first rank of each kind."""
    kinds = tuple(
        Stage(
            decoder,
            tuple(len(part.blocks) for part in parts),
            any(part.first for part in parts),
            any(part.last for part in parts),
            fused_qkv,
            fused_gate_up,
        )
        for parts in stage_parts(decoder, seq_len, pp, virtual_pp, cuts)
    )
    first: dict[Stage, int] = {}
    for rank, kind in enumerate(kinds):
        first.setdefault(kind, rank)
    return kinds, tuple(first.values())


@lru_cache(maxsize=65_536)
def stage_entries(stage: Stage, tp: int, shard: int) -> Entries:
    """Entries of all parameters of a stage."""
    block, rest = one_block(stage, tp, shard), beside_blocks(stage, tp, shard)
    number = sum(stage.blocks)
    return Entries(
        local=number * block.local + rest.local,
        rows=number * block.rows + rest.rows,
        largest=max(block.largest, rest.largest),
        padded=number * block.padded + rest.padded,
    )


@lru_cache(maxsize=65_536)
def one_block(stage: Stage, tp: int, shard: int) -> Entries:
    """Entries of one block of a stage."""
    specs = block_specs(stage.decoder, tp, fused_qkv=stage.fused_qkv, fused_gate_up=stage.fused_gate_up)
    return block_entries(specs, tp, shard)


@lru_cache(maxsize=65_536)
def beside_blocks(stage: Stage, tp: int, shard: int) -> Entries:
    """Entries of a stage's parameters outside of its blocks."""
    return block_entries(rest_specs(stage.decoder, first=stage.first, last=stage.last), tp, shard)
