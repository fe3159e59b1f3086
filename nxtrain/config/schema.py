"""Schema of the configuration: every key of a run, with its unit, its default and its meaning.

The schema is data only; it reads no file and no device. Relative paths are relative to the working directory. The
sections are frozen and strict: an integer is accepted for a float, and no other value is converted.
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
"""Values of backend.name that record whole steps as graphs, without process groups of their own."""

ON_GPUS = "cuda"
"""Value of backend.name that GPUs have."""

ATTENTION = {
    "cpu": ("auto", "plain"),
    "cuda": ("auto", "sdpa", "cudnn", "flash", "flash3", "flash4", "flex", "plain"),
    "xla": ("auto", "plain"),
    "neuron": ("auto", "plain", "flash"),
    "neuron-native": ("auto", "plain", "flash"),
}
"""Values of backend.attention that each backend has."""

QUANTIZING = ("auto", "cpu", "cuda")
"""Values of backend.name that may have a library for quantized weights."""


class IdentityConfig(Section):
    """[run]: name, folder and seed of the run."""

    name: str = "nxtrain"
    """Name in logs and reports."""
    dir: LocalPath = Field(default_factory=lambda data: Path("runs") / data["name"])
    """Folder of everything that the run writes; by default runs/ and the name."""
    seed: NonNegativeInt = 0
    """Start of all randomness: initial weights and data order."""


class ClusterConfig(Section):
    """[cluster]: the machines."""

    instance: str = ""
    """Instance type, such as `trn1.32xlarge`; empty: this machine."""
    nodes: Degree = 1
    """Number of machines."""


class ModelChoiceConfig(Section):
    """[model]: family, shape and initial weights of the model."""

    family: str = ""
    """Installed model family, such as `llama`; empty: that of model.hf, else llama."""
    preset: str = ""
    """Published shape, such as `llama3-8b`; empty: `tiny`, unless model.hf gives the shape."""
    hf: ModelLocation = ""
    """Folder whose config.json gives the shape, or `org/name[@revision]` of the Hub, which is pinned to a commit."""
    init: Literal["scaled", "normal", "hf"] = "scaled"
    """Initial weights: normal, scaled (output projections by 1/sqrt(2 x layers)), or those of model.hf."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Changes to the shape, under Hugging Face's names, such as `num_hidden_layers`."""
    fused_qkv: bool = True
    """One matrix for the query, key and value projections."""
    fused_gate_up: bool = True
    """One matrix for the gate and up projections."""
    moe_dispatch: Literal["dropless", "capacity"] = "dropless"
    """Tokens that experts compute: all, or as many for each as moe_capacity_factor allows."""
    moe_capacity_factor: PositiveFloat = 1.25
    """With moe_dispatch=capacity, most tokens of an expert in a micro-batch, relative to an even load."""
    moe_z_loss: NonNegativeFloat = 0.0
    """Factor of the routers' z-loss, which keeps their logits small; 0: none."""


class ParallelConfig(Section):
    """[parallel]: degrees and modes of parallelism."""

    tp: Degree = 1
    """Tensor parallel degree: ranks that share each layer."""
    pp: Degree = 1
    """Pipeline parallel degree: stages that share the layers."""
    virtual_pp: Degree = 1
    """Model chunks per pipeline stage; more make the pipeline's bubble smaller, and its transfers more."""
    schedule: Literal["1f1b", "zero_bubble"] = "1f1b"
    """Order of a pipeline's work; zero_bubble postpones weight gradients: less waiting, more activations held."""
    pipeline_cuts: tuple[Size, ...] = Field(default=(), strict=False)
    """First block of each chunk but the first, pp x virtual_pp - 1 of them; empty: cut so that all cost alike."""
    dp: DerivedDegree = 0
    """Data parallel degree: copies of the model; 0: the ranks that tp, pp and cp leave over."""
    cp: Degree = 1
    """Context parallel degree: ranks that share the positions of each sequence."""
    cp_layout: Literal["auto", "contiguous", "zigzag", "striped"] = "auto"
    """Positions of a cp rank: a piece, a piece from each end, or every cp-th; auto: zigzag, else striped. Ring kernels
    of the NKI Library take striped."""
    cp_method: Literal["auto", "gather", "ring"] = "auto"
    """Exchange of keys and values over cp: gathered, or passed in a ring; auto: ring on cpu and cuda, and where the NKI
    Library's ring kernels can run, else gather."""
    ep: Degree = 1
    """Expert parallel degree: adjacent ranks of dp x cp that divide the experts, whose tokens they exchange."""
    sequence_parallel: bool = False
    """Cut the sequence over tp between the matrix products."""
    async_tp: bool = False
    """On cuda, compiled blocks overlap gathers and scatters of sequence_parallel with their products, through torch's
    symmetric memory."""
    shard: Literal["none", "zero1", "grad_op", "full", "hybrid"] = "none"
    """State sharded over dp x cp: nothing, optimizer state, gradients too, parameters too, or those in a node."""
    shard_size: DerivedDegree = 0
    """With shard=hybrid, adjacent dp ranks that cut state between them; 0: those of one node."""
    bucket_mib: Size = 64
    """MiB of gradients in one data parallel collective."""
    unit_params: NonNegativeInt = 0
    """With shard=grad_op, full or hybrid, fewest parameters of a unit, of adjacent blocks; 0: each block is a unit."""
    prefetch: NonNegativeInt = 1
    """With shard=grad_op, full or hybrid, units that are gathered ahead of their use; 0: torch's own choice."""
    forward_prefetch: bool = True
    """Forward passes gather units ahead; otherwise each as its turn comes."""
    backward_prefetch: Literal["before", "after", "none"] = "before"
    """Backward passes gather units ahead: before the gradients of the unit at work, after them, or not at all."""
    offload: Offload = Field(default=(), strict=False)
    """State in host memory: optimizer, activations, and params that are sharded; true: optimizer and params."""

    @property
    def ranks_per_replica(self) -> int:
        """Ranks that compute one sequence together."""
        return self.tp * self.cp * self.pp

    @property
    def degrees(self) -> str:
        """Degrees of parallelism as text; cp and ep appear only above 1."""
        context = "" if self.cp == 1 else f"cp={self.cp} "
        return f"tp={self.tp} {context}pp={self.pp} dp={self.dp}" + ("" if self.ep == 1 else f" ep={self.ep}")


class TrainConfig(Section):
    """[train]: number of steps, and the work of each. Batches are counted in sequences."""

    steps: PositiveInt = 1000
    """Optimizer updates of the whole run."""
    epochs: NonNegativeFloat = 0.0
    """Passes over the rows of the data, as 3 or 0.5, in place of train.steps; 0: train.steps counts."""
    seq_len: Size = 128
    """Tokens per sequence."""
    global_batch: Size = 8
    """Sequences per update, over all dp ranks."""
    batch_ramp: Ramp = Field(default=(), strict=False)
    """Stages before the full global batch: tables of global_batch, and of the samples or tokens trained with it."""
    seq_ramp: SeqRamp = Field(default=(), strict=False)
    """Stages of shorter sequences, several in a row: tables of seq_len, and of the tokens trained with it."""
    micro_batch: Size = 1
    """Sequences per dp rank in one forward pass; the rest of the global batch is accumulated."""
    remat: Literal["none", "selective", "full"] = "none"
    """Activations that backward recomputes: nothing, attention (from 8192 tokens MLPs too), whole blocks."""
    eval_every: NonNegativeInt = 0
    """Steps between evaluations on held-out data; 0: never."""
    eval_batches: Size = 8
    """Global batches per evaluation."""
    z_loss: NonNegativeFloat = 0.0
    """Factor of the squared log of the softmax's denominator, which is added to each token's loss; 0: none."""
    loss_chunk_mib: NonNegativeInt = 0
    """Most MiB of float32 logits that one rank holds at once; 0: 2048 on cuda, 64 elsewhere."""

    def logits_mib(self, backend: str) -> int:
        """Most MiB of float32 logits that a rank holds at once.

        Each chunk of them reads the whole output matrix and adds to its whole gradient, so that a GPU gains by few.

        Args:
            backend: `cpu`, `cuda`, `xla` ...
        """
        if self.loss_chunk_mib:
            return self.loss_chunk_mib
        return 2048 if backend == ON_GPUS else 64

    def batch_sizes(self, step: int = 0, tokens: int = 0) -> BatchSizes:
        """Global batch of each update, from a step on that has seen so many tokens."""
        return batch_sizes(self.batch_ramp, self.global_batch, self.seq_len, step=step, tokens=tokens)


class PrecisionConfig(Section):
    """[precision]: number types of parameters, of gradient sums and of the update."""

    type: Literal["manual", "fp32", "bf16SR", "mixed_precision", "mixed_precisionSR", "autocast"] = "manual"
    """Preset of the keys below under a name of NxD Training; manual: each key as it is given."""
    params: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Parameters and activations; fp16, on cpu and cuda, scales the loss so that small gradients stay above zero."""
    accumulate: Literal["fp32", "bf16"] = "fp32"
    """Sums of gradients over micro-batches."""
    reduce: Literal["fp32", "bf16"] = "fp32"
    """Sums of gradients over dp ranks."""
    update: Literal["fp32", "fp32_master", "bf16_stochastic", "bf16_kahan"] = "fp32"
    """Update rule: in fp32 params, on fp32 copies of bf16 params, by stochastic rounding, or compensated."""
    state: Literal["fp32", "bf16"] = "fp32"
    """Running means of the gradient and of its square; bf16 is rounded to nearest, under bf16_stochastic at random."""
    fp8: Literal["none", "tensorwise", "rowwise", "mxfp8"] = "none"
    """Products of the blocks' linear layers in float8, with scales of matrices, rows or 32 entries; cuda, or cpu."""
    loss_scale: PositiveFloat = 65536.0
    """With params=fp16, first factor of the mean loss of a micro-batch; halved when a gradient overflows."""
    loss_scale_every: PositiveInt = 2000
    """With params=fp16, steps without overflow after which the factor doubles."""


class OptimConfig(MuonConfig, RuleSchedulesConfig):
    """[optim]: AdamW or Muon, the schedules and clipping."""

    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.95), strict=False)
    """Decay of the running means of the gradient and of its square."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the squared gradient's mean."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay, times lr per step; see weight_decay_schedule."""
    decay_norms: bool = False
    """Weight decay also applies to norm weights; it never applies to biases."""
    clip: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0: never clip."""
    ema_decay: Beta = 0.0
    """Decay of a running mean of the weights, in float32 in each checkpoint; 0: none."""


class DataConfig(Section):
    """[data]: source of the training data, tokenizer and order."""

    source: Literal["stdlib", "text", "arrow", "tokens"] = "stdlib"
    """The installed Python's standard library, text files, Arrow tables, or a .npy of token ids."""
    path: CorpusPlace = ""
    """File, folder or glob that the source reads; of source=arrow and tokens also `s3://`, `gs://` or `az://bucket/key`."""
    mixture: tuple[CorpusPlace, ...] = Field(default=(), strict=False)
    """Several corpora of source=arrow or tokens, in place of path; each row is of one of them."""
    weights: tuple[PositiveFloat, ...] = Field(default=(), strict=False)
    """Share of the rows for each corpus of mixture, in any unit; empty: equal shares."""
    tokenizer: LocalText = ""
    """tokenizer.json or its folder; empty: that of the weights of model.init=hf or checkpoint.resume, else a byte-level
    BPE of the model's vocab_size, trained on the data."""
    teacher: CorpusPlace = ""
    """.npy file of nxtrain data teach, for distillation: the most likely tokens of a teacher for each target of
    source=tokens."""
    teacher_k: Annotated[int, Field(ge=0, le=1024)] = 0
    """Tokens of data.teacher for each target."""
    teacher_weight: float = Field(default=1.0, gt=0, le=1)
    """Weight of the teacher's tokens in the loss; the true token has the rest."""
    packing: Literal["concat", "best_fit"] = "concat"
    """Documents end to end, or fitted whole into rows."""
    doc_mask: bool = False
    """Tokens attend only inside their own document, in which positions begin at 0."""
    shuffle: bool = True
    """Rows in an order drawn from the seed, new each epoch; otherwise in the order of the file."""
    validation_path: CorpusPlace = ""
    """Prepared corpus for evaluation, of source=arrow; empty: validation_fraction of the documents, if any."""
    validation_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Share of the documents that is held out for evaluation."""
    workers: Annotated[int, Field(ge=0, le=256)] = 2
    """Processes of each rank that tokenize and pack source=arrow; 0: a thread of the rank."""
    worker_restarts: NonNegativeInt = 3
    """Times in a row that a worker which dies or hangs is replaced; 0: the first one ends the run."""
    cache_dir: LocalPath = Path("/var/tmp/nxtrain-data-{user}")
    """Folder on a disk of each node for what is read of buckets; `{user}` and `{host}` are filled in."""


class CheckpointConfig(Section):
    """[checkpoint]: interval, retention, mirror and resume."""

    every: NonNegativeInt = 1000
    """Steps between checkpoints; 0: never."""
    keep: PositiveInt = 3
    """Newest checkpoints that stay on disk; two that were read back and are whole stay in any case."""
    keep_every: NonNegativeInt = 0
    """Checkpoints of steps that are multiples of this stay for good; 0: none."""
    async_: bool = Field(default=True, alias="async")
    """Write while training goes on, which waits only until its state is copied to host memory."""
    mirror: StorageLocation = ""
    """Folder, or prefix as `s3://bucket/run`, that gets a copy of each checkpoint; run.dir may then be of a node."""
    strict: bool = False
    """A checkpoint that cannot be written ends the run; otherwise a line reports it, and training goes on."""
    resume: StorageLocation = "auto"
    """`auto`: from the newest checkpoint of run.dir that is whole, if any; `never`; or a path or an address of one."""
    allow_drift: tuple[Literal["seed", "batch", "tokenizer", "data", "code"], ...] = Field(default=(), strict=False)
    """Differences allowed from the run that wrote the checkpoint; the losses are then not those of one run."""


class BackendConfig(Section):
    """[backend]: the kind of device and of layers."""

    name: Literal["auto", "cpu", "cuda", "xla", "neuron", "neuron-native"] = "auto"
    """Kind of device; auto takes the best one present and says why."""
    layers: Literal["auto", "native", "nxd"] = "auto"
    """Parallel layers: our own, or NeuronX Distributed's; auto takes the latter on neuron, where they are installed."""
    attention: Literal["auto", "sdpa", "cudnn", "flash", "flash3", "flash4", "flex", "plain"] = "auto"
    """Kernel of attention; auto says why which. Neuron devices have plain and flash, cuda has all, others have plain.
    plain are elementary operations; sdpa leaves the choice to torch."""
    experts: Literal["auto", "blockwise", "plain"] = "auto"
    """Experts on neuron: blockwise are kernels of the NKI Library, for dropless experts, plain are products of blocks;
    auto takes the kernels where they can run, and says why or why not. Other devices have plain ones."""
    deterministic: bool = False
    """On cuda, equal bits each time that a step is repeated, by slower kernels; cpu has equal bits in any case."""
    rounding: Literal["auto", "software", "hardware"] = "auto"
    """Random bits of precision.update=bf16_stochastic: by keys in software, equal on every device, or by the hardware's
    generator (untested on neuron-native); auto: hardware on neuron, software elsewhere."""
    cpu_transport: Literal["auto", "gloo", "shared_memory"] = "auto"
    """On backend.name=cpu, exchange between ranks; auto: shared memory within a host, where our C++ builds."""
    in_flight: Annotated[int, Field(ge=1, le=63)] = 3
    """On backend.name=neuron before SDK 2.31, graphs that the host submits before the first is done."""
    allow_unverified: bool = False
    """Take layers and attention of a neuronx-distributed outside 0.15 to 0.18, whose gradients nobody has compared."""

    @model_validator(mode="before")
    @classmethod
    def _drop_cpu_kernels(cls, table: Any) -> Any:
        """Drop a key without effect, which the recorded configurations of earlier runs hold."""
        if not isinstance(table, Mapping):
            return table
        return {key: value for key, value in table.items() if key != "cpu_kernels"}


class RunConfig(Section):
    """A whole run."""

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
        """Reason for which only nxtrain's own parallel layers serve the run; empty if any layers do."""
        if self.finetune.adapts:
            return "finetune.method=lora or qlora adds adapters to nxtrain's own layers"
        if self.parallel.cp > 1:
            return f"parallel.cp={self.parallel.cp} divides sequences between nxtrain's own layers"
        return f"parallel.ep={self.parallel.ep} divides nxtrain's own experts" if self.parallel.ep > 1 else ""
