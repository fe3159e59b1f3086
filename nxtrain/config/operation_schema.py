"""Schema of the sections around training: metrics, compiled graphs and recovery."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from nxtrain.config.section import GraphFolder, LocalPath, NonNegativeInt, Seconds, Section, Size


class MetricsConfig(Section):
    """[metrics]: interval and sinks of the metrics."""

    log_every: int = Field(default=10, ge=1, le=240)
    """Steps between lines of metrics.jsonl; each reads from the device once, which remembers bad steps so long."""
    tensorboard: bool = True
    """Write TensorBoard event files as well."""
    prometheus: bool = False
    """Write the newest record to prometheus.prom, for the textfile collector of Prometheus' node exporter."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Log to Weights & Biases: into run.dir/wandb, for `wandb sync`, or to its server. Extra `wandb`."""
    mlflow: str = ""
    """Tracking store of MLflow, such as `http://HOST:5000`; empty: none. Extra `mlflow`."""
    progress: bool = True
    """Show progress in the terminal."""
    spike_threshold: float = Field(default=0.1, ge=0, le=1e9)
    """Gradient norm above its running mean over 20 steps from which a step belongs to a spike."""
    noise_scale: bool = False
    """Record the gradient noise scale, in sequences: a global batch far below gains from more, far above gains little;
    from dp 2 on, without cp, with shard=none or zero1."""
    step_sections: Literal["auto", "on", "off"] = "auto"
    """Time of forward, backward, reduction and update in each step: by the host's clock on cpu, by events of the device
    on cuda, and not elsewhere, where whole steps are queued; auto: on cpu."""
    profile_steps: tuple[Size, ...] = Field(default=(), strict=False)
    """First and last step that torch's profiler records into logs/profiles, at most 100; empty: none."""
    profile_ranks: tuple[NonNegativeInt, ...] = Field(default=(0,), strict=False)
    """Ranks that are profiled."""


class CompileConfig(Section):
    """[compile]: compiled graphs."""

    cache_dir: GraphFolder = Path("compile_cache/{host}")
    """Folder of this node's compiled graphs, on its own disk; `{host}` becomes the name of the node."""
    allow_network: bool = False
    """Take a cache_dir on a network file system, where many ranks at once lose and tear entries."""
    optlevel: int = Field(default=0, ge=0, le=3)
    """Optimization level of Neuron's compiler, 1 to 3; 0: the default of the compiler or of TorchNeuron."""
    max_recompiles: NonNegativeInt = 3
    """Most times that work which is already compiled may compile another graph; one more ends the run."""
    torch_compile: Literal[False, True, "step"] = False
    """torch.compile of each block, on CUDA and TorchNeuron also of loss and update; step: of the whole pass, in which
    parallel.shard gathers parameters; PyTorch/XLA compiles anyway."""
    allow_fallbacks: bool = False
    """On neuron-native, take operations that TorchNeuron computes on the host; otherwise step 1 ends with code 5."""
    manifest: LocalPath = Path("compile_cache/manifests/{name}.json")
    """Graphs that `nxtrain compile` compiled; `{name}` is run.name. A node of some stages adds `.stages-0`, ..."""
    on_miss: Literal["compile", "stop"] = "compile"
    """Reaction of a run on Neuron devices to a graph outside the manifest: compile and warn, or end with code 5."""


class RecoveryConfig(Section):
    """[recovery]: reaction to failures, hangs and divergence."""

    hang_timeout_s: Seconds = 1800.0
    """Seconds that a rank waits for the others, or gets no further itself, before the run counts as hung."""
    max_restarts: NonNegativeInt = 0
    """Times that the launcher starts failed ranks again; the count restarts when a run gets further than before."""
    in_job: bool = False
    """Replace lost ranks alone, within max_restarts: the others keep their processes, and the run goes on from their
    memory without a lost step. Where no replica holds the state of a lost rank, all ranks load the newest checkpoint.
    For CPUs and GPUs of one machine; a GPU waits once per step."""
    grace_s: Seconds = 300.0
    """Seconds in which ranks that are asked to stop may finish a step and save; then the launcher kills them.
    Half of it may go into a copy in checkpoint.mirror. A run that is done waits as long for one that is stuck."""
    max_same_step: NonNegativeInt = 3
    """Failures in a row after one and the same step, with which a run starts no more; 0: it always does."""
    non_finite: Literal["stop", "skip", "rollback"] = "stop"
    """After a step whose loss or gradient is not finite, which updates nothing: end with code 6, go on, or end so that
    ranks that are started again replay it from the newest checkpoint, separating faults of machines from others."""
    vote_every: NonNegativeInt = 0
    """Steps between comparisons of all that several ranks hold alike, also done before each checkpoint; 0: never."""
    on_divergence: Literal["warn", "stop", "rollback"] = "warn"
    """Reaction to a gradient norm that stays above three times its lowest: warn, end with code 6, or end so that ranks
    that are started again go back to a checkpoint from before the growth, and leave out the batches since then."""
    debug: Literal["off", "dist"] = "off"
    """Logs of communication in run.dir/logs/dist: each collective first names the ranks that do not come, and torch,
    NCCL and the Neuron runtime log what they do. It costs time at each collective, and changes no number."""
