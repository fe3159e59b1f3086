"""Parameters of a rank by name: whole and local shape, entries in checkpoints, and bytes; computed without torch.

Units of full sharding follow `parallel/fully_sharded.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from nxtrain.backends.limits import NF4_GROUP, nf4_offsets
from nxtrain.common.dimensions import EMBEDDING, HEAD, is_matrix
from nxtrain.common.mesh import Axis, Mesh
from nxtrain.common.sharding import ShardBox, ShardSpec, row_cut
from nxtrain.common.stages import units_of
from nxtrain.config.finetune import BLOCK
from nxtrain.plan.adapters import adapted_layers, expert_adapters
from nxtrain.plan.job import SIZES, Job
from nxtrain.plan.memory import state_size
from nxtrain.plan.moments import accumulated_size
from nxtrain.plan.shapes import Stage


@dataclass(frozen=True)
class Parameter:
    """Parameter of a pipeline stage.

    Args:
        name: Name in the model, or inside a block.
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
    """Part of a parameter that one rank holds.

    Args:
        parameter: The parameter.
        local_shape: Shape on a tensor parallel rank; for an NF4 matrix, the shape of its packed form.
        shape: Shape of the rows that the rank stores.
        state_shape: Shape of the rows whose optimizer state the rank has, padding included; empty if frozen.
        dtype: Type of the stored entries: `fp32`, `bf16`, `fp16` or `nf4`.
        num_bytes: Bytes of the stored entries.
        boxes: Ranges of the whole tensors that the rank holds.
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
        """Dimension along which each mesh axis shards the parameter."""
        spec = self.parameter.spec
        cuts = {}
        is_cut_by_tp = self.parameter.is_packed or self.local_shape != spec.shape
        if spec.dim is not None and is_cut_by_tp:
            cuts["tp"] = spec.dim
        if self.shape != self.local_shape:
            cuts["dp"] = 0
        return cuts


@dataclass(frozen=True)
class RankBytes:
    """Bytes of the training state of one rank, with trained and frozen parameters separately."""

    params: int
    frozen: int
    grads: int
    optimizer: int

    def to_json(self) -> dict[str, int]:
        """Bytes of the training state by kind and in total."""
        kinds = {"params": self.params, "frozen": self.frozen, "grads": self.grads, "optimizer": self.optimizer}
        return {**kinds, "total": sum(kinds.values())}


@dataclass(frozen=True)
class Unit:
    """FSDP unit: modules whose sharded parameters are gathered together.

    Args:
        modules: Names of the blocks; for parameters outside the blocks, the names of the parameters.
        entries: Elements of the parameters on a tensor parallel rank.
    """

    modules: tuple[str, ...]
    entries: int


def block_parameters(job: Job, kind: Stage, ep_rank: int = 0) -> Iterator[Parameter]:
    """Parameters of each block of a stage, by names inside the block; adapters follow the layers that they adapt."""
    tp = job.config.parallel.tp
    adapters: dict[str, dict[str, ShardSpec]] = {}
    if job.adapters is not None:
        adapters = {layer.path: layer.specs() for layer in adapted_layers(kind, tp, job.adapters)}
        adapters |= expert_adapters(kind, tp, job.adapters, ep_rank)
    specs = kind.block_specs(tp, ep_rank)
    for name, spec in specs.items():
        is_packed = job.method == "qlora" and is_matrix(spec)
        yield Parameter(name, spec, job.adapters is None, is_packed)
        path, _, leaf = name.rpartition(".")
        if leaf == "weight" and f"{path}.bias" in specs:
            continue
        for adapter, adapter_spec in adapters.get(path, {}).items():
            yield Parameter(adapter, adapter_spec, True)


@dataclass(frozen=True)
class Rank:
    """One rank of a run, with its parameters and training state.

    Args:
        job: The run.
        mesh: The axes of the rank.
    """

    job: Job
    mesh: Mesh

    @staticmethod
    def of(job: Job, rank: int) -> Rank:
        """Rank of a run with a given number, in the order [pp, dp, cp, tp]."""
        parallel = job.config.parallel
        tp = parallel.tp
        pp = parallel.pp
        dp = parallel.dp
        cp = parallel.cp
        ep = parallel.ep
        mesh = Mesh.build(job.world, rank, tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, shard=job.shard_size)
        return Rank(job, mesh)

    @staticmethod
    def first_of(job: Job, stage: int) -> Rank:
        """First rank of a pipeline stage, which holds at least as much as the stage's other ranks."""
        return Rank.of(job, stage * (job.world // job.config.parallel.pp))

    @property
    def stage(self) -> int:
        """Index of the rank's pipeline stage."""
        return self.mesh.pp.rank

    @cached_property
    def blocks(self) -> tuple[range, ...]:
        """Indices in the whole model of the blocks of each chunk."""
        return tuple(part.blocks for part in self.job.parts[self.stage])

    @cached_property
    def block(self) -> tuple[Held, ...]:
        """Parameters of a block on the rank, by name in the block; of a block with experts, if the model has any."""
        return self._hold_block(self.job.stages[self.stage])

    @cached_property
    def dense_block(self) -> tuple[Held, ...]:
        """Parameters on the rank of each block without experts, in a model whose other blocks have experts."""
        return self._hold_block(self.job.stages[self.stage].dense)

    def block_at(self, index: int) -> tuple[Held, ...]:
        """Parameters on the rank of a block, given the block's index in the whole model."""
        return self.dense_block if index in self.job.dimensions.dense_layers else self.block

    def _hold_block(self, kind: Stage) -> tuple[Held, ...]:
        return tuple(self._hold(parameter) for parameter in block_parameters(self.job, kind, self.mesh.ep.rank))

    @cached_property
    def others(self) -> tuple[Held, ...]:
        """Parameters on the rank that are outside the blocks."""
        specs = self.job.stages[self.stage].rest_specs()
        is_trained = self.job.adapters is None
        return tuple(self._hold(Parameter(name, spec, is_trained)) for name, spec in specs.items())

    def tensors(self) -> Iterator[Held]:
        """All parameters on the rank, in model order."""
        for held in self.others:
            if held.parameter.name == EMBEDDING:
                yield held
        for chunk in self.blocks:
            for index in chunk:
                for held in self.block_at(index):
                    name = f"model.layers.{index}.{held.parameter.name}"
                    yield replace(held, parameter=replace(held.parameter, name=name))
        for held in self.others:
            if held.parameter.name != EMBEDDING:
                yield held

    @cached_property
    def bytes(self) -> RankBytes:
        """Bytes of the rank's training state."""
        kind = self.job.stages[self.stage]
        params = frozen = 0
        trained = updated = with_one_mean = 0
        has_muon = self.job.config.optim.name == "muon"
        counted = [(kind.num_blocks - kind.num_dense, held) for held in self.block]
        if kind.num_dense:
            counted += [(kind.num_dense, held) for held in self.dense_block]
        counted += [(1, held) for held in self.others]
        for count, held in counted:
            if held.parameter.is_trained:
                params += count * held.num_bytes
                trained += count * math.prod(held.shape)
                updated += count * math.prod(held.state_shape)
                if has_muon and len(held.parameter.spec.shape) > 1 and held not in self.others:
                    with_one_mean += count * math.prod(held.state_shape)
            else:
                frozen += count * held.num_bytes
        optimizer = updated * state_size(self.job)
        optimizer -= with_one_mean * SIZES[self.job.config.precision.state]
        if self.job.config.parallel.shard == "zero1":
            optimizer += updated * self.job.params_size
        return RankBytes(params, frozen, trained * accumulated_size(self.job), optimizer)

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """Units of full sharding in forward order, then a unit of all other parameters; empty without full sharding."""
        if not self.job.is_fully_sharded:
            return ()
        alone = self.job.stages[self.stage].lone_units
        around = {held.parameter.name: _unit_of(held) for held in self.others if held.parameter.name in alone}
        units = []
        if EMBEDDING in around:
            units.append(around[EMBEDDING])
        for chunk in self.blocks:
            sizes = []
            for index in chunk:
                sizes.append(sum(math.prod(held.local_shape) for held in self.block_at(index)))
            for unit in units_of(sizes, self.job.config.parallel.unit_params):
                entries = sum(sizes[index] for index in unit)
                units.append(Unit(tuple(f"model.layers.{chunk[index]}" for index in unit), entries))
        if HEAD in around:
            units.append(around[HEAD])
        rest = [held for held in self.others if held.parameter.name not in alone]
        if rest:
            units.append(_unit_of(*rest))
        return tuple(units)

    def _hold(self, parameter: Parameter) -> Held:
        job, spec = self.job, parameter.spec.of_rank(self.mesh.ep)
        local = spec.local_shape(self.mesh.tp)
        if parameter.is_packed:
            local = _packed_shape(spec, self.mesh.tp, job.params_size)
        shard = self.mesh.experts.shard if spec.expert else self.mesh.dense.shard
        stored = local
        rows = Axis("whole", 0, ((0,),))
        if job.is_fully_sharded:
            stored = (row_cut(local[0], shard)[1], *local[1:])
            if not parameter.is_packed:
                rows = shard
        updated: tuple[int, ...] = ()
        size = job.params_size
        if parameter.is_trained:
            updated = stored
            size = job.stored_size
            if job.config.parallel.shard == "zero1":
                updated = (-(-local[0] // shard.size), *local[1:])
        return Held(
            parameter=parameter,
            local_shape=local,
            shape=stored,
            state_shape=updated,
            dtype=_dtype(job, parameter),
            num_bytes=math.prod(stored) * size,
            boxes=tuple(spec.blocks(self.mesh.tp, rows)),
        )


def _unit_of(*parameters: Held) -> Unit:
    """Full-sharding unit of some parameters outside the blocks."""
    names = tuple(held.parameter.name.removesuffix(".weight") for held in parameters)
    return Unit(names, sum(math.prod(held.local_shape) for held in parameters))


def global_tensors(held: Held) -> Mapping[str, tuple[int, ...]]:
    """Name and whole shape of each tensor that stores a parameter in checkpoints."""
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
    """Shape of an NF4 matrix in packed form, in entries of `size` bytes, as `backends/nf4.py:Packing` packs it."""
    blocks = groups = 0
    dim = spec.dim or 0
    for piece in spec.pieces(tp):
        whole = spec.global_shape(piece.segment)
        blocks += whole[1 - dim] * piece.length // BLOCK
        groups += -(-whole[0] * whole[1] // (BLOCK * NF4_GROUP))
    num_bytes = nf4_offsets(BLOCK, blocks, groups, len(spec.segments))[-1]
    return num_bytes // size, 1
