"""Parameters of a rank by name: whole shape, local shape, entries of checkpoints' tensors, and bytes; without torch.

Names and shapes mirror `models/decoder/model.py`, `finetune/lora.py` and `finetune/quantized.py`. Units mirror
`parallel/fully_sharded.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from nxtrain.common.mesh import Axis, Mesh
from nxtrain.common.sharding import ShardBox, ShardSpec, row_cut
from nxtrain.common.stages import units_of
from nxtrain.config.finetune import BLOCK
from nxtrain.plan.adapters import adapted_layers, is_matrix
from nxtrain.plan.job import SIZES, Job
from nxtrain.plan.memory import state_size
from nxtrain.plan.moments import accumulated_size
from nxtrain.plan.shapes import block_specs, rest_specs

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

_IN_BLOCK = {
    "input_layernorm": "input_layernorm",
    **{name: f"self_attn.{name}" for name in ("qkv_proj", "q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "o_proj")},
    "post_attention_layernorm": "post_attention_layernorm",
    **{name: f"mlp.{name}" for name in ("gate_up_proj", "gate_proj", "up_proj", "down_proj")},
}
"""Module of each layer of a block, in the order of the model."""

_LEAVES = ("weight", "bias", "lora_A", "lora_B")

_GROUP = 256
"""As `backends/nf4.py:GROUP`."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of a pipeline stage.

    Args:
        name: Name in the model.
        spec: Sharding over tp.
        is_trained: The parameter has a gradient.
        is_packed: The matrix is stored in NF4.
    """

    name: str
    spec: ShardSpec
    is_trained: bool
    is_packed: bool = False


@dataclass(frozen=True)
class Held:
    """A parameter as one rank holds it.

    Args:
        parameter: The parameter.
        local_shape: Shape on a tensor parallel rank; of a packed matrix, that of its packed form.
        shape: Rows of it that the rank stores.
        state_shape: Rows of it whose optimizer state the rank has, padding included; empty if it is frozen.
        dtype: Type of the stored entries: `fp32`, `bf16`, `fp16` or `nf4`.
        num_bytes: Bytes of the stored entries.
        boxes: Entries of whole tensors that the rank holds.
    """

    parameter: Parameter
    local_shape: tuple[int, ...]
    shape: tuple[int, ...]
    state_shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    boxes: tuple[ShardBox, ...]

    @property
    def cuts(self) -> dict[str, int]:
        """Dimension along which each axis cuts the parameter."""
        tp = {} if self.parameter.spec.dim is None or self.is_whole_over_tp else {"tp": self.parameter.spec.dim}
        return tp | ({"dp": 0} if self.shape != self.local_shape else {})

    @property
    def is_whole_over_tp(self) -> bool:
        """True if tensor parallel ranks share nothing of the parameter."""
        return not self.parameter.is_packed and self.local_shape == self.parameter.spec.shape


@dataclass(frozen=True)
class RankBytes:
    """Bytes of the training state of one rank; trained parameters and frozen ones apart."""

    params: int
    frozen: int
    grads: int
    optimizer: int

    def to_json(self) -> dict[str, int]:
        """All kinds and their sum."""
        kinds = {"params": self.params, "frozen": self.frozen, "grads": self.grads, "optimizer": self.optimizer}
        return {**kinds, "total": sum(kinds.values())}


@dataclass(frozen=True)
class Unit:
    """Modules whose sharded parameters are gathered at once.

    Args:
        modules: Names of the blocks; of the unit of all other parameters, the names of these.
        entries: Entries of a tensor parallel rank.
    """

    modules: tuple[str, ...]
    entries: int


def block_parameters(job: Job, stage: int) -> tuple[Parameter, ...]:
    """Parameters of each block of a stage, by names inside the block."""
    kind, tp = job.stage(stage), job.config.parallel.tp
    specs = block_specs(job.decoder, tp, fused_qkv=kind.fused_qkv, fused_gate_up=kind.fused_gate_up)
    adapters: dict[str, ShardSpec] = {}
    if job.adapters is not None:
        for layer in adapted_layers(kind, tp, job.adapters):
            adapters |= layer.specs()
    found: dict[tuple[str, str], Parameter] = {}
    for key, spec in (*specs.items(), *adapters.items()):
        layer_name, _, leaf = key.partition(".")
        leaf = leaf or "weight"
        name = f"{_IN_BLOCK[layer_name]}.{leaf}"
        is_packed = job.method == "qlora" and key in specs and is_matrix(spec)
        found[layer_name, leaf] = Parameter(name, spec, job.adapters is None or key in adapters, is_packed)
    return tuple(found[layer, leaf] for layer in _IN_BLOCK for leaf in _LEAVES if (layer, leaf) in found)


@dataclass(frozen=True)
class Rank:
    """One rank of a run, and all that it holds of the model and of the training state.

    Args:
        job: The run.
        mesh: The axes of the rank.
    """

    job: Job
    mesh: Mesh

    @staticmethod
    def of(job: Job, rank: int) -> Rank:
        """A rank of a run, by its number in the order [pp, dp, tp]."""
        parallel = job.config.parallel
        mesh = Mesh.build(job.world, rank, tp=parallel.tp, pp=parallel.pp, dp=parallel.dp, shard=job.shard_size)
        return Rank(job, mesh)

    @staticmethod
    def first_of(job: Job, stage: int) -> Rank:
        """First rank of a pipeline stage, which holds the most of its ranks."""
        return Rank.of(job, stage * job.config.parallel.tp * job.config.parallel.dp)

    @property
    def stage(self) -> int:
        """Pipeline stage."""
        return self.mesh.pp.rank

    @cached_property
    def blocks(self) -> tuple[range, ...]:
        """Blocks of each model chunk, by index in the whole model."""
        return tuple(part.blocks for part in self.job.parts[self.stage])

    @cached_property
    def block(self) -> tuple[Held, ...]:
        """Parameters of each block, by names inside the block."""
        return tuple(self._hold(each) for each in block_parameters(self.job, self.stage))

    @cached_property
    def others(self) -> tuple[Held, ...]:
        """Parameters outside the blocks."""
        kind, tied = self.job.stage(self.stage), self.job.decoder.tied
        is_trained = self.job.adapters is None
        held = []
        for key, spec in rest_specs(self.job.decoder, first=kind.first, last=kind.last).items():
            name = {"embed_tokens": EMBEDDING, "norm": "model.norm.weight", "lm_head": HEAD}[key]
            copy = replace(spec, tied_to=EMBEDDING) if tied and name == HEAD else spec
            held.append(self._hold(Parameter(name, copy, is_trained)))
        return tuple(held)

    def tensors(self) -> Iterator[Held]:
        """All parameters, in the order of the model."""
        yield from (each for each in self.others if each.parameter.name == EMBEDDING)
        for index in (index for chunk in self.blocks for index in chunk):
            for each in self.block:
                whole = f"model.layers.{index}.{each.parameter.name}"
                yield replace(each, parameter=replace(each.parameter, name=whole))
        yield from (each for each in self.others if each.parameter.name != EMBEDDING)

    @cached_property
    def bytes(self) -> RankBytes:
        """Bytes of the training state."""
        params = frozen = trained = updated = 0
        num_blocks = sum(len(chunk) for chunk in self.blocks)
        for count, held in (*((num_blocks, each) for each in self.block), *((1, each) for each in self.others)):
            if not held.parameter.is_trained:
                frozen += count * held.num_bytes
                continue
            params += count * held.num_bytes
            trained += count * math.prod(held.shape)
            updated += count * math.prod(held.state_shape)
        own_rows = updated * self.job.params_size if self.job.config.parallel.shard == "zero1" else 0
        optimizer = updated * state_size(self.job) + own_rows
        return RankBytes(params, frozen, trained * accumulated_size(self.job), optimizer)

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """Units in the order of the forward pass, the parameters outside the blocks last; none if all are whole."""
        if not self.job.is_fully_sharded:
            return ()
        size = sum(math.prod(each.local_shape) for each in self.block)
        found = []
        for chunk in self.blocks:
            for unit in units_of([size] * len(chunk), self.job.config.parallel.unit_params):
                found.append(Unit(tuple(f"model.layers.{chunk[index]}" for index in unit), size * len(unit)))
        if self.others:
            names = tuple(each.parameter.name.removesuffix(".weight") for each in self.others)
            found.append(Unit(names, sum(math.prod(each.local_shape) for each in self.others)))
        return tuple(found)

    def _hold(self, parameter: Parameter) -> Held:
        job, spec = self.job, parameter.spec
        local = spec.local_shape(self.mesh.tp)
        if parameter.is_packed:
            local = _packed_shape(spec, self.mesh.tp, job.params_size)
        stored, shard = local, self.mesh.shard
        if job.is_fully_sharded:
            stored = (row_cut(local[0], shard)[1], *local[1:])
        updated = stored
        if job.config.parallel.shard == "zero1":
            updated = (-(-local[0] // shard.size), *local[1:])
        size = job.stored_size if parameter.is_trained else job.params_size
        rows = shard if job.is_fully_sharded and not parameter.is_packed else Axis("whole", 0, ((0,),))
        return Held(
            parameter,
            local,
            stored,
            updated if parameter.is_trained else (),
            _dtype(job, parameter),
            math.prod(stored) * size,
            tuple(spec.blocks(self.mesh.tp, rows)),
        )


def global_tensors(held: Held) -> Mapping[str, tuple[int, ...]]:
    """Whole shape of each tensor that a parameter is in checkpoints, by name."""
    spec, name = held.parameter.spec, held.parameter.name
    return {spec.global_name(name, segment): spec.global_shape(segment) for segment in spec.segments}


def _dtype(job: Job, parameter: Parameter) -> str:
    precision = job.config.precision
    if parameter.is_packed:
        return "nf4"
    if parameter.is_trained and job.is_fully_sharded and precision.params != "fp32":
        return precision.reduce
    return precision.params


def _packed_shape(spec: ShardSpec, tp: Axis, size: int) -> tuple[int, ...]:
    """Shape of the packed form of a matrix in entries of `size` bytes, as `backends/nf4.py:Packing`."""
    blocks = groups = 0
    for piece in spec.pieces(tp):
        whole = spec.global_shape(piece.segment)
        dim = spec.dim or 0
        blocks += whole[1 - dim] * piece.length // BLOCK
        groups += -(-whole[0] * whole[1] // (BLOCK * _GROUP))
    scales = -(-blocks // SIZES["fp32"]) * SIZES["fp32"]
    numbers = (groups + len(spec.segments)) * SIZES["fp32"]
    return (blocks * BLOCK // 2 + scales + numbers) // size, 1
