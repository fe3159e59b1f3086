"""Training job for which memory and time are predicted: model dimensions, machines and configuration."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from typing import Literal

from nxtrain.backends.attention_choice import AttentionShape, choose_torch, context_method
from nxtrain.backends.limits import MAX_HEAD_SIZE, SEQUENCE_TILE, keeps_probabilities
from nxtrain.common.dimensions import Dimensions
from nxtrain.common.machines import Machine
from nxtrain.common.sequence_cut import ContextMethod
from nxtrain.common.stages import StagePart
from nxtrain.config.schema import FULLY_SHARDED, ON_GPUS, ON_XLA, RunConfig
from nxtrain.plan.adapters import Adapters, FrozenBytes, Method, frozen_bytes, stage_adapters
from nxtrain.plan.shapes import Entries, Stage, pipeline_stages, stage_entries, stage_parts

Attention = Literal["probabilities", "fused", "grouped", "blocked", "scores"]
"""Attention implementations, distinguished by the tensors that they save in addition to queries, keys and values.

probabilities: The probabilities of all blocks, in `backends/cpu_attention.py`.
fused: Torch's fused kernel, which gets repeated K/V heads.
grouped: A fused kernel that repeats no heads: torch's, FlexAttention's or NKI's.
blocked: A sum for each query, in `backends/ranged_attention.py`.
scores: All scores, in attention made of elementary operations.
"""

_BY_KEPT_BYTES: tuple[Attention, ...] = ("fused", "grouped", "blocked", "probabilities", "scores")
"""Attention implementations, ascending by the bytes that they save for backward."""

_BY_DOCUMENT = ("per-document", "flash", "flex")
"""Attention kernels that compute no scores between different documents of a row."""

SIZES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of a number, by the name of its type in the configuration."""


@dataclass(frozen=True)
class Job:
    """Training job: a model and its configuration on a number of machines.

    Args:
        dimensions: Dimensions of the model.
        machine: Kind of machine.
        nodes: Number of machines.
        config: Configuration, with `parallel.dp` resolved.
        shorter_len: Tokens of each of several sequences in a row, in a sequence length ramp; 0 if a row is one
            sequence.
    """

    dimensions: Dimensions
    machine: Machine
    nodes: int
    config: RunConfig
    shorter_len: int = 0

    @cached_property
    def dense(self) -> Job:
        """The same job for a model in which no block has experts."""
        return replace(self, dimensions=self.dimensions.dense)

    @property
    def world(self) -> int:
        """Number of ranks of the job."""
        parallel = self.config.parallel
        return parallel.ranks_per_replica * parallel.dp

    @cached_property
    def num_micro(self) -> int:
        """Number of micro-batches of a step."""
        return self.config.train.global_batch // (self.config.train.micro_batch * self.config.parallel.dp)

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens of a global batch."""
        return self.config.train.global_batch * self.config.train.seq_len

    @property
    def sequence_len(self) -> int:
        """Tokens of a sequence; several sequences may share a row."""
        return self.shorter_len or self.config.train.seq_len

    @cached_property
    def computed_len(self) -> int:
        """Sequence length that attention computes: that of a whole row, unless the kernel skips masked scores."""
        if self.shorter_len and self.backend in ("cpu", ON_GPUS):
            chosen = choose_torch(self.backend, self.config.backend.attention, self.attention_shape)
            if chosen is not None and chosen.kind in _BY_DOCUMENT and self.config.parallel.cp == 1:
                return self.shorter_len
        return self.config.train.seq_len

    @property
    def is_trainium(self) -> bool:
        """True if the machine has Trainium chips, with any backend."""
        return self.machine.kind.startswith("trn")

    @cached_property
    def backend(self) -> str:
        """Name of the backend; `auto` is resolved by the kind of chip."""
        if self.config.backend.name != "auto":
            return self.config.backend.name
        if not self.is_trainium:
            return ON_GPUS
        if self.machine.kind == "trn1":
            return "neuron"
        return "neuron-native"

    @cached_property
    def is_lazy(self) -> bool:
        """True on PyTorch/XLA, where a step is a graph and the code overlaps no transfers."""
        return self.backend in ON_XLA

    @property
    def meets_all_keys(self) -> bool:
        """True if queries of a context parallel rank meet all keys of a row: compiled graphs do not know positions."""
        return self.is_lazy or bool(self.config.compile.torch_compile)

    @cached_property
    def fuses_context(self) -> bool:
        """True if a fused kernel computes attention between context parallel ranks."""
        shape = self.attention_shape
        if shape.cp == 1 or self.backend != ON_GPUS:
            return False
        chosen = choose_torch(self.backend, self.config.backend.attention, replace(shape, full_layers=0))
        return chosen is not None and chosen.kind == "flash"

    @property
    def copies(self) -> int:
        """Number of ranks of dp x cp, which hold the same parameters and sum their gradients."""
        return self.config.parallel.dp * self.config.parallel.cp

    @cached_property
    def cp_method(self) -> ContextMethod:
        """Method of exchanging keys and values over cp."""
        return context_method(self.config.parallel.cp_method, self.backend)

    @cached_property
    def shard_size(self) -> int:
        """Number of ranks that share one copy of the training state, as `train/build.py:build_mesh` groups them."""
        parallel = self.config.parallel
        if parallel.shard == "none":
            return 1
        if parallel.shard != "hybrid":
            return self.copies
        if parallel.shard_size:
            return parallel.shard_size
        per_node = min(self.machine.devices, self.world)
        return 1 if per_node % parallel.tp else math.gcd(self.copies, per_node // parallel.tp)

    @cached_property
    def is_fully_sharded(self) -> bool:
        """True if parameters are sharded over the ranks of dp x cp (full sharding)."""
        return self.config.parallel.shard in FULLY_SHARDED and self.shard_size > 1

    @cached_property
    def postpones(self) -> bool:
        """True if weight gradients of blocks are computed later than the gradients of their inputs (zero bubble)."""
        return self.config.parallel.schedule == "zero_bubble" and self.adapters is None

    @property
    def has_nxd_layers(self) -> bool:
        """True if layers are NeuronX Distributed's; `auto` selects them on backend `neuron` if the run allows them."""
        if self.config.backend.layers == "auto":
            return self.backend == "neuron" and not self.config.needs_own_layers
        return self.config.backend.layers == "nxd"

    @property
    def has_params_on_host(self) -> bool:
        """True if stored parameters and their reduced gradients are offloaded to host memory."""
        return "params" in self.config.parallel.offload and self.is_fully_sharded

    @cached_property
    def params_size(self) -> int:
        """Bytes of a parameter in the type of the computation."""
        return SIZES[self.config.precision.params]

    @cached_property
    def stored_size(self) -> int:
        """Bytes of a parameter in the type of its storage, as in `precision.py:Precision.sharded_params`."""
        wide = self.is_fully_sharded and self.config.precision.params != "fp32"
        return SIZES[self.config.precision.reduce] if wide else self.params_size

    @cached_property
    def local_len(self) -> int:
        """Positions of each sequence that a context parallel rank holds."""
        return self.config.train.seq_len // self.config.parallel.cp

    @cached_property
    def sequence_rows(self) -> int:
        """Tokens of a micro-batch that a rank holds between layers; sequence parallelism divides them by tp."""
        parallel = self.config.parallel
        return self.micro_tokens // (parallel.tp if parallel.sequence_parallel else 1)

    @property
    def micro_tokens(self) -> int:
        """Tokens of a micro-batch at the positions of a context parallel rank."""
        return self.local_len * self.config.train.micro_batch

    @cached_property
    def attention_shape(self) -> AttentionShape:
        """Shape of a rank's attention, from which the attention kernel is chosen."""
        return AttentionShape.of(self.config, self.dimensions)

    @cached_property
    def attention(self) -> Attention:
        """Attention implementation on the job's backend; if layers differ, the one that saves more tensors."""
        if self.attention_shape.is_mixed:
            return max(self.windowed_attention, self.full_attention, key=_BY_KEPT_BYTES.index)
        return self.windowed_attention

    @cached_property
    def windowed_attention(self) -> Attention:
        """Attention implementation of layers with a window; of all layers in a model without windows."""
        return self._attention_of(replace(self.attention_shape, full_layers=0))

    @cached_property
    def full_attention(self) -> Attention:
        """Attention implementation of layers without a window."""
        return self._attention_of(replace(self.attention_shape, full_layers=0, window=None))

    @cached_property
    def block_window(self) -> int | None:
        """Most tokens that a query sees in layers with blockwise attention; None for all tokens before it."""
        if self.attention_shape.is_mixed and self.full_attention == "blocked":
            return None
        return self.attention_shape.window

    def _attention_of(self, shape: AttentionShape) -> Attention:
        """Attention implementation of layers that all have the same window."""
        train = self.config.train
        if self.config.parallel.cp > 1:
            return "grouped" if self.fuses_context else "blocked"
        if self.backend in ("neuron", "neuron-native"):
            return self._attention_on_trainium(shape)
        chosen = choose_torch(self.backend, self.config.backend.attention, shape)
        if chosen is not None and chosen.kind == "blocked":
            return "blocked"
        if self.backend == "cpu":
            is_short = keeps_probabilities(train.micro_batch, self.local_heads, train.seq_len, self.params_size)
            return "probabilities" if is_short else "fused"
        if self.backend == "xla" or (chosen is not None and chosen.kind == "plain"):
            return "scores"
        # Among GPU kernels, only FlexAttention supports grouped heads in float32.
        is_wide = self.config.precision.params == "fp32"
        return "fused" if is_wide and chosen is not None and chosen.kind != "flex" else "grouped"

    def _attention_on_trainium(self, shape: AttentionShape) -> Attention:
        seq_len = self.config.train.seq_len
        if shape.limits:
            return "blocked"
        if not self.is_lazy:
            return "grouped"
        fits = seq_len % SEQUENCE_TILE == 0 and self.dimensions.head_size <= MAX_HEAD_SIZE
        if fits and self.config.backend.attention != "plain" and self.config.precision.params == "bf16":
            return "grouped"
        return "blocked" if shape.is_long else "scores"

    @property
    def repeats_heads(self) -> bool:
        """True if attention gets a copy of a K/V head for each query head that the head serves."""
        return self.attention == "fused"

    @cached_property
    def local_heads(self) -> int:
        """Number of query heads of a tensor parallel rank."""
        return self.dimensions.num_heads // self.config.parallel.tp

    @cached_property
    def local_kv_heads(self) -> int:
        """Number of key and value heads of a tensor parallel rank, including replicated heads."""
        return max(1, self.dimensions.num_kv_heads // self.config.parallel.tp)

    @cached_property
    def query_width(self) -> int:
        """Columns of the queries on a tensor parallel rank."""
        return self.local_heads * self.dimensions.head_size

    @cached_property
    def key_width(self) -> int:
        """Columns of the keys on a tensor parallel rank; the values have as many."""
        return self.local_kv_heads * self.dimensions.head_size

    @cached_property
    def inner_width(self) -> int:
        """Intermediate size of the feed-forward, or of an expert, on a tensor parallel rank; includes padding."""
        mixture = self.dimensions.mixture
        width = self.dimensions.intermediate_size if mixture is None else mixture.expert_size
        return -(-width // self.config.parallel.tp)

    @property
    def slots(self) -> int:
        """Rows that a rank's experts compute for a micro-batch if routers balance the load; 0 without experts.

        With a capacity, shapes that do not depend on the routing have rows for the capacity of every expert.
        """
        mixture, model = self.dimensions.mixture, self.config.model
        if mixture is None:
            return 0
        slots = self.micro_tokens * mixture.experts_per_token
        is_static = self.backend != "cpu" and (self.backend != ON_GPUS or self.config.parallel.ep > 1)
        if model.moe_dispatch == "capacity" and (is_static or self.config.compile.torch_compile):
            return mixture.num_experts * math.ceil(slots * model.moe_capacity_factor / mixture.num_experts)
        return slots

    @cached_property
    def vocab_rows(self) -> int:
        """Vocabulary rows of a tensor parallel rank; includes padding."""
        return -(-self.dimensions.vocab_size // self.config.parallel.tp)

    @cached_property
    def parts(self) -> list[tuple[StagePart, ...]]:
        """Parts of the model on every pipeline rank, one for each chunk."""
        parallel = self.config.parallel
        return stage_parts(
            self.dimensions, self.config.train.seq_len, parallel.pp, parallel.virtual_pp, parallel.pipeline_cuts
        )

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Description of every pipeline rank's stage: its blocks, embedding and output projection."""
        model, parallel = self.config.model, self.config.parallel
        shape = Stage(self.dimensions, (), False, False, model.fused_qkv, model.fused_gate_up, parallel.ep)
        return pipeline_stages(
            shape, self.config.train.seq_len, parallel.pp, parallel.virtual_pp, parallel.pipeline_cuts
        )

    @cached_property
    def distinct_stages(self) -> tuple[int, ...]:
        """First pipeline rank of each distinct kind of stage."""
        first: dict[Stage, int] = {}
        for rank, stage in enumerate(self.stages):
            first.setdefault(stage, rank)
        return tuple(first.values())

    def entries(self, index: int, shard: int = 0) -> Entries:
        """Number of parameters of a pipeline stage on a rank; `shard=0` shards their rows as the run does."""
        key = index, shard or self.shard_size
        if key not in self._entries:  # cached, since every kind of memory needs them
            self._entries[key] = stage_entries(self.stages[index], self.config.parallel.tp, key[1])
        return self._entries[key]

    @cached_property
    def _entries(self) -> dict[tuple[int, int], Entries]:
        return {}

    @cached_property
    def adapters(self) -> Adapters | None:
        """Low-rank adapters of a frozen model; None if every parameter is trained."""
        finetune = self.config.finetune
        if finetune.method == "full":
            return None
        return Adapters(finetune.r, finetune.targets)

    @property
    def method(self) -> Method:
        """Fine-tuning method: all parameters, or adapters of a frozen or quantized model."""
        return self.config.finetune.method

    def trained(self, index: int, shard: int = 0) -> Entries:
        """Number of trained parameters of a pipeline stage on a rank; arguments as in `entries`."""
        if self.adapters is None:
            return self.entries(index, shard)
        tp = self.config.parallel.tp
        return stage_adapters(self.stages[index], tp, shard or self.shard_size, self.adapters)

    def frozen(self, index: int) -> FrozenBytes:
        """Bytes of a pipeline stage's frozen parameters; all 0 without adapters."""
        if self.adapters is None:
            return FrozenBytes()
        shard = self.shard_size if self.is_fully_sharded else 1
        quantized = self.method == "qlora"
        return frozen_bytes(self.stages[index], self.config.parallel.tp, shard, self.params_size, quantized=quantized)


def once_per_job(compute: Callable[[Job], int]) -> Callable[[Job], int]:
    """Decorator that caches a computed number on the job, since a search computes each number many times."""
    name = f"_{compute.__name__}"

    @wraps(compute)
    def kept(job: Job) -> int:
        known: dict[str, int] = job.__dict__
        if name not in known:
            known[name] = compute(job)
        return known[name]

    return kept
