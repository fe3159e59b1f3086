"""Schema of the configuration: every key of a run, with its type, default, unit and meaning.

The schema reads no file and no device. Relative paths are relative to the working directory. The sections are frozen
and strict. An integer is accepted for a float, and no other value is converted.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    model_validator,
)

from nxtrain.common.batch_sizes import BatchSizes
from nxtrain.config.batch_ramp import Ramp, SeqRamp, batch_sizes
from nxtrain.config.finetune_schema import FinetuneConfig
from nxtrain.config.muon import MuonConfig
from nxtrain.config.operation_schema import CompileConfig, MetricsConfig, RecoveryConfig
from nxtrain.config.rule_schedules import RuleSchedulesConfig
from nxtrain.config.section import (
    Beta,
    CorpusPlace,
    Degree,
    DerivedDegree,
    LocalPath,
    LocalText,
    ModelLocation,
    NonNegativeInt,
    PositiveInt,
    Section,
    Size,
    StorageLocation,
)

OffloadKind = Literal["params", "optimizer", "activations"]


def _offloaded(given: object) -> object:
    if isinstance(given, bool):
        return ("params", "optimizer") if given else ()
    return given


Offload = Annotated[tuple[OffloadKind, ...], BeforeValidator(_offloaded)]

FULLY_SHARDED = ("grad_op", "full", "hybrid")
"""Values of parallel.shard that shard parameters and gradients."""

ON_XLA = ("xla", "neuron")
"""Values of backend.name that record whole steps as graphs through PyTorch/XLA."""

ON_GPUS = "cuda"
"""Value of backend.name for GPUs."""

ATTENTION = {
    "cpu": ("auto", "plain"),
    "cuda": ("auto", "sdpa", "cudnn", "flash", "flash3", "flash4", "flex", "plain"),
    "xla": ("auto", "plain"),
    "neuron": ("auto", "plain", "flash"),
    "neuron-native": ("auto", "plain", "flash"),
}
"""Values of backend.attention that each backend supports."""

QUANTIZING = ("auto", "cpu", "cuda")
"""Values of backend.name for which a library of quantized weights may be installed."""


class IdentityConfig(Section):
    """[run]: name, folder and seed of the run."""

    name: str = "nxtrain"
    """Name of the run in logs and reports."""
    dir: LocalPath = Field(default_factory=lambda data: Path("runs") / data["name"])
    """Folder for all files that the run writes. The default is runs/ and the name."""
    seed: NonNegativeInt = 0
    """Seed of all random numbers, such as initial weights and data order."""


class ClusterConfig(Section):
    """[cluster]: type and number of the machines."""

    instance: str = ""
    """Instance type of the machines, such as `trn1.32xlarge`; empty for this machine."""
    nodes: Degree = 1
    """Number of machines."""


class ModelChoiceConfig(Section):
    """[model]: family, shape and initial weights of the model."""

    family: str = ""
    """Installed model family, such as `llama`. Empty for the family of model.hf, else llama."""
    preset: str = ""
    """Published model shape, such as `llama3-8b`. Empty for `tiny`, or for the shape of model.hf."""
    hf: ModelLocation = ""
    """Folder whose config.json gives the shape, or `org/name[@revision]` of the Hub, which is pinned to a commit."""
    init: Literal["scaled", "normal", "hf"] = "scaled"
    """Initial weights: normal, scaled (output projections divided by sqrt(2 x layers)), or hf, the weights of
    model.hf."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Changes to the model's shape, with Hugging Face's key names, such as `num_hidden_layers`."""
    fused_qkv: bool = True
    """Fuse the query, key and value projections in one matrix."""
    fused_gate_up: bool = True
    """Fuse the gate and up projections in one matrix."""
    moe_dispatch: Literal["dropless", "capacity"] = "dropless"
    """Tokens that experts compute. dropless computes all, and capacity drops tokens beyond moe_capacity_factor."""
    moe_capacity_factor: PositiveFloat = 1.25
    """With moe_dispatch=capacity, maximum tokens of an expert in a micro-batch, relative to an even load."""
    moe_z_loss: NonNegativeFloat = 0.0
    """Coefficient of the router z-loss, which keeps router logits small; 0 for none."""


class ParallelConfig(Section):
    """[parallel]: parallelism degrees, sharding and pipeline schedule."""

    tp: Degree = 1
    """Tensor parallel degree: ranks over which each layer is sharded."""
    pp: Degree = 1
    """Pipeline parallel degree: stages into which the layers are divided."""
    virtual_pp: Degree = 1
    """Model chunks per pipeline stage. More chunks make the pipeline bubble smaller, and need more transfers."""
    schedule: Literal["1f1b", "zero_bubble"] = "1f1b"
    """Pipeline schedule. zero_bubble postpones weight gradients, which shortens the bubble and keeps more
    activations."""
    pipeline_cuts: tuple[Size, ...] = Field(default=(), strict=False)
    """First block of every chunk except the first, pp x virtual_pp - 1 numbers. Empty for chunks of equal cost."""
    dp: DerivedDegree = 0
    """Data parallel degree: number of model replicas. 0 uses all ranks, divided by tp x pp x cp."""
    cp: Degree = 1
    """Context parallel degree: ranks over which the positions of each sequence are divided."""
    cp_layout: Literal["auto", "contiguous", "zigzag", "striped"] = "auto"
    """Positions of a cp rank: one piece, one piece from each end (zigzag), or every cp-th (striped). auto uses zigzag,
    else striped. Ring kernels of the NKI Library use striped."""
    cp_method: Literal["auto", "gather", "ring"] = "auto"
    """Exchange of keys and values over cp by all-gather or in a ring. auto uses a ring on cpu and cuda, and where ring
    kernels of the NKI Library can run, else gather."""
    ep: Degree = 1
    """Expert parallel degree: adjacent ranks of dp x cp over which experts are divided, with all-to-all of tokens."""
    sequence_parallel: bool = False
    """Shard activations along the sequence over tp, outside of the matrix products."""
    async_tp: bool = False
    """On cuda, compiled blocks overlap collectives of sequence_parallel with matrix products, by torch's symmetric
    memory."""
    shard: Literal["none", "zero1", "grad_op", "full", "hybrid"] = "none"
    """State sharded over dp x cp. zero1 shards optimizer state, grad_op also gradients, full also parameters. hybrid is
    full inside groups of shard_size ranks."""
    shard_size: DerivedDegree = 0
    """With shard=hybrid, number of adjacent ranks over which state is sharded; 0 for the ranks of one node."""
    bucket_mib: Size = 64
    """Bucket size: MiB of gradients in one data parallel collective."""
    unit_params: NonNegativeInt = 0
    """With shard=grad_op, full or hybrid, minimum parameters of a sharding unit of adjacent blocks. 0 for one block
    each."""
    prefetch: NonNegativeInt = 1
    """With shard=grad_op, full or hybrid, number of units to all-gather ahead of use. 0 uses torch's default."""
    forward_prefetch: bool = True
    """All-gather units ahead of use in the forward pass. Otherwise each unit is gathered when it is used."""
    backward_prefetch: Literal["before", "after", "none"] = "before"
    """All-gather units ahead in the backward pass: before or after the gradients of the current unit, or not at all."""
    offload: Offload = Field(default=(), strict=False)
    """State kept in host memory: optimizer, activations, and sharded params. true means optimizer and params."""

    @property
    def ranks_per_replica(self) -> int:
        """Number of ranks that compute one sequence together: tp x cp x pp."""
        return self.tp * self.cp * self.pp

    @property
    def degrees(self) -> str:
        """Parallelism degrees as text. cp and ep appear only if above 1."""
        context = "" if self.cp == 1 else f"cp={self.cp} "
        return f"tp={self.tp} {context}pp={self.pp} dp={self.dp}" + ("" if self.ep == 1 else f" ep={self.ep}")


class TrainConfig(Section):
    """[train]: length of the run, batch sizes, evaluation and memory use. Batches are counted in sequences."""

    steps: PositiveInt = 1000
    """Optimizer updates of the whole run."""
    epochs: NonNegativeFloat = 0.0
    """Length of the run in passes over the data rows, such as 3 or 0.5, in place of train.steps. 0 uses train.steps."""
    seq_len: Size = 128
    """Tokens per sequence."""
    global_batch: Size = 8
    """Sequences per update, over all dp ranks."""
    batch_ramp: Ramp = Field(default=(), strict=False)
    """Stages with a smaller global batch at the beginning of the run: tables of global_batch and samples or tokens."""
    seq_ramp: SeqRamp = Field(default=(), strict=False)
    """Stages with shorter sequences at the beginning of the run, several in a row: tables of seq_len and tokens."""
    micro_batch: Size = 1
    """Sequences of a micro-batch, per dp rank. Gradients are accumulated over the micro-batches of a global batch."""
    remat: Literal["none", "selective", "full"] = "none"
    """Activation checkpointing: recompute nothing, attention (from 8192 tokens also MLPs), or whole blocks."""
    eval_every: NonNegativeInt = 0
    """Steps between evaluations on held-out data; 0 for never."""
    eval_batches: Size = 8
    """Global batches of each evaluation."""
    z_loss: NonNegativeFloat = 0.0
    """Coefficient of the z-loss: the squared log of the softmax denominator, added to each token's loss. 0 for none."""
    loss_chunk_mib: NonNegativeInt = 0
    """Maximum MiB of float32 logits in memory on one rank. 0 means 2048 on cuda, 64 elsewhere."""

    def logits_mib(self, backend: str) -> int:
        """Maximum MiB of float32 logits in memory on one rank.

        Each chunk of logits reads the whole output matrix and updates its whole gradient, so a GPU is faster with few
        chunks.

        Args:
            backend: Name of the backend, such as `cuda`.
        """
        if self.loss_chunk_mib:
            return self.loss_chunk_mib
        return 2048 if backend == ON_GPUS else 64

    def batch_sizes(self, step: int = 0, tokens: int = 0) -> BatchSizes:
        """Global batch size of each update of a run that resumes after `step` updates and `tokens` tokens."""
        return batch_sizes(self.batch_ramp, self.global_batch, self.seq_len, step=step, tokens=tokens)


class PrecisionConfig(Section):
    """[precision]: number types of parameters, gradients, optimizer state and update."""

    type: Literal["manual", "fp32", "bf16SR", "mixed_precision", "mixed_precisionSR", "autocast"] = "manual"
    """Preset of the keys below, with a name of NxD Training. manual uses each key as given."""
    params: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Type of parameters and activations. fp16, on cpu and cuda, uses a loss scale against underflow of gradients."""
    accumulate: Literal["fp32", "bf16"] = "fp32"
    """Type of gradient sums over micro-batches."""
    reduce: Literal["fp32", "bf16"] = "fp32"
    """Type of gradient sums over dp ranks."""
    update: Literal["fp32", "fp32_master", "bf16_stochastic", "bf16_kahan"] = "fp32"
    """Update rule: directly on fp32 params, on fp32 master weights, by stochastic rounding, or by Kahan summation."""
    state: Literal["fp32", "bf16"] = "fp32"
    """Type of AdamW's moments. bf16 rounds to nearest, or stochastically with update=bf16_stochastic."""
    fp8: Literal["none", "tensorwise", "rowwise", "mxfp8"] = "none"
    """Matrix products of linear layers in blocks in float8, with a scale per matrix, row or 32 entries; on cuda or
    cpu."""
    loss_scale: PositiveFloat = 65536.0
    """With params=fp16, initial loss scale of a micro-batch's mean loss. Halved when a gradient overflows."""
    loss_scale_every: PositiveInt = 2000
    """With params=fp16, steps without overflow after which the loss scale doubles."""


class OptimConfig(MuonConfig, RuleSchedulesConfig):
    """[optim]: optimizer, schedules, weight decay and gradient clipping."""

    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.95), strict=False)
    """Betas of AdamW: decay of the moving averages of the gradient and of its square."""
    eps: PositiveFloat = 1e-8
    """Epsilon of AdamW, added to the square root of the second moment."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay, multiplied by lr in each step; see weight_decay_schedule."""
    decay_norms: bool = False
    """Apply weight decay to norm weights too. Biases never have weight decay."""
    clip: NonNegativeFloat = 1.0
    """Maximum global gradient norm for clipping; 0 for no clipping."""
    ema_decay: Beta = 0.0
    """Decay of a moving average of the weights, stored as float32 in each checkpoint; 0 for none."""


class DataConfig(Section):
    """[data]: training and evaluation data, tokenizer, packing and order."""

    source: Literal["stdlib", "text", "arrow", "tokens"] = "stdlib"
    """Kind of the data: Python's standard library, text files, Arrow tables, or a .npy file of token ids."""
    path: CorpusPlace = ""
    """File, folder or glob of the data. With source=arrow or tokens also `s3://`, `gs://` or `az://bucket/key`."""
    mixture: tuple[CorpusPlace, ...] = Field(default=(), strict=False)
    """Several corpora of source=arrow or tokens, in place of path. Each row is from one corpus."""
    weights: tuple[PositiveFloat, ...] = Field(default=(), strict=False)
    """Share of the rows from each corpus of mixture, in any unit; empty for equal shares."""
    tokenizer: LocalText = ""
    """tokenizer.json or its folder. Empty for the tokenizer of the loaded weights or checkpoint. Without these, a
    byte-level BPE of the model's vocab_size is trained on the data."""
    teacher: CorpusPlace = ""
    """For distillation, .npy file of nxtrain data teach: a teacher's most likely tokens for each target of
    source=tokens."""
    teacher_k: Annotated[int, Field(ge=0, le=1024)] = 0
    """Number of teacher tokens for each target in data.teacher."""
    teacher_weight: float = Field(default=1.0, gt=0, le=1)
    """Weight of the teacher's tokens in the loss. The true token has the remaining weight."""
    packing: Literal["concat", "best_fit"] = "concat"
    """Packing of documents into rows: concatenated and cut, or whole documents by best fit."""
    doc_mask: bool = False
    """Restrict attention to each token's own document, whose positions begin at 0."""
    shuffle: bool = True
    """Shuffle the rows by the seed, differently in each epoch. Otherwise rows keep the order of the file."""
    validation_path: CorpusPlace = ""
    """Prepared corpus for evaluation, with source=arrow. Empty to use validation_fraction."""
    validation_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Share of the documents that is held out for evaluation."""
    workers: Annotated[int, Field(ge=0, le=256)] = 2
    """Data loader processes of each rank, which tokenize and pack source=arrow. 0 uses a thread of the rank."""
    worker_restarts: NonNegativeInt = 3
    """Maximum consecutive replacements of a data loader process that dies or hangs. At 0, the first failure ends the
    run."""
    cache_dir: LocalPath = Path("/var/tmp/nxtrain-data-{user}")
    """Folder on a local disk of each node that caches data read from buckets. `{user}` and `{host}` are filled in."""


class CheckpointConfig(Section):
    """[checkpoint]: interval, retention, mirror and resume."""

    every: NonNegativeInt = 1000
    """Steps between checkpoints; 0 for never."""
    keep: PositiveInt = 3
    """Number of newest checkpoints to keep on disk. Two checkpoints that were read back and verified always remain."""
    keep_every: NonNegativeInt = 0
    """Checkpoints at multiples of this step are kept forever; 0 for none."""
    async_: bool = Field(default=True, alias="async")
    """Write checkpoints in the background. Training waits only while state is copied to host memory."""
    mirror: StorageLocation = ""
    """Folder or bucket prefix, such as `s3://bucket/run`, for a copy of each checkpoint. run.dir may then be
    node-local."""
    strict: bool = False
    """End the run if any checkpoint cannot be written. Otherwise print a warning, and end only for the last one."""
    resume: StorageLocation = "auto"
    """Checkpoint to resume from: `auto` for the newest intact one in run.dir, `never`, or a path or address."""
    allow_drift: tuple[Literal["seed", "batch", "tokenizer", "data", "code"], ...] = Field(default=(), strict=False)
    """Differences allowed from the run that wrote the checkpoint: seed, batch, tokenizer, data, code. Losses then
    differ from those of one continuous run."""


class BackendConfig(Section):
    """[backend]: kind of device, layers and kernels."""

    name: Literal["auto", "cpu", "cuda", "xla", "neuron", "neuron-native"] = "auto"
    """Kind of device. auto selects the best available kind, and prints the reason."""
    layers: Literal["auto", "native", "nxd"] = "auto"
    """Tensor parallel layers: nxtrain's own (native) or NeuronX Distributed's (nxd). auto uses nxd on neuron if
    installed."""
    attention: Literal["auto", "sdpa", "cudnn", "flash", "flash3", "flash4", "flex", "plain"] = "auto"
    """Attention kernel. auto prints its choice with the reason. Neuron devices have plain and flash, cuda has all,
    others have plain. plain uses elementary operations. sdpa leaves the choice to torch."""
    experts: Literal["auto", "blockwise", "plain"] = "auto"
    """Implementation of experts on neuron. blockwise uses kernels of the NKI Library for dropless experts, and plain
    uses products of blocks. auto uses the kernels if they can run, and prints the reason. Other devices have only
    plain."""
    deterministic: bool = False
    """On cuda, use slower kernels whose results are bitwise reproducible. On cpu, results always are."""
    rounding: Literal["auto", "software", "hardware"] = "auto"
    """Random bits of precision.update=bf16_stochastic. software derives bits from keys, equal on every device. hardware
    uses the device's generator (untested on neuron-native). auto uses hardware on neuron, software elsewhere."""
    cpu_transport: Literal["auto", "gloo", "shared_memory"] = "auto"
    """On backend.name=cpu, transport between ranks. auto is shared memory inside a host if nxtrain's C++ code
    compiles."""
    in_flight: Annotated[int, Field(ge=1, le=63)] = 3
    """On backend.name=neuron before SDK 2.31, number of graphs that the host submits ahead of completion."""
    allow_unverified: bool = False
    """Accept a neuronx-distributed version outside 0.15 to 0.18, whose gradients have not been verified."""

    @model_validator(mode="before")
    @classmethod
    def _drop_cpu_kernels(cls, table: Any) -> Any:
        """Drop the key cpu_kernels, which has no effect, but is in recorded configurations of earlier runs."""
        if not isinstance(table, Mapping):
            return table
        return {key: value for key, value in table.items() if key != "cpu_kernels"}


class RunConfig(Section):
    """Complete configuration of a run, with all sections."""

    run: IdentityConfig = IdentityConfig()
    cluster: ClusterConfig = ClusterConfig()
    model: ModelChoiceConfig = ModelChoiceConfig()
    parallel: ParallelConfig = ParallelConfig()
    train: TrainConfig = TrainConfig()
    precision: PrecisionConfig = PrecisionConfig()
    optim: OptimConfig = OptimConfig()
    finetune: FinetuneConfig = FinetuneConfig()
    data: DataConfig = DataConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    backend: BackendConfig = BackendConfig()
    metrics: MetricsConfig = MetricsConfig()
    compile: CompileConfig = CompileConfig()
    recovery: RecoveryConfig = RecoveryConfig()

    @property
    def needs_own_layers(self) -> str:
        """Reason why the run works only with nxtrain's own parallel layers; empty if any layers work."""
        if self.finetune.adapts:
            return "finetune.method=lora or qlora adds adapters to nxtrain's own layers"
        if self.parallel.cp > 1:
            return f"parallel.cp={self.parallel.cp} divides sequences between nxtrain's own layers"
        return f"parallel.ep={self.parallel.ep} divides nxtrain's own experts" if self.parallel.ep > 1 else ""
