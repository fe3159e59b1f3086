"""Schema of the sections [metrics], [compile] and [recovery]."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from nxtrain.config.section import GraphFolder, LocalPath, NonNegativeInt, Seconds, Section, Size


class MetricsConfig(Section):
    """[metrics]: interval and outputs of the metrics."""

    log_every: int = Field(default=10, ge=1, le=240)
    """Steps between lines of metrics.jsonl. Each line needs one read from the device, which counts bad steps in
    between."""
    tensorboard: bool = True
    """Also write TensorBoard event files."""
    prometheus: bool = False
    """Write the newest record to prometheus.prom, for the textfile collector of Prometheus' node exporter."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Log to Weights & Biases: into run.dir/wandb for `wandb sync`, or to its server. Needs the extra `wandb`."""
    mlflow: str = ""
    """Address of an MLflow tracking server, such as `http://HOST:5000`; empty for none. Needs the extra `mlflow`."""
    progress: bool = True
    """Show progress in the terminal."""
    spike_threshold: float = Field(default=0.1, ge=0, le=1e9)
    """A step is a spike if its gradient norm exceeds the running mean over 20 steps by this value."""
    noise_scale: bool = False
    """Record the gradient noise scale, in sequences. A global batch far below it gains from more sequences. Needs dp of
    2 or more, cp=1, ep=1, and shard=none or zero1."""
    step_sections: Literal["auto", "on", "off"] = "auto"
    """Measure the time of forward, backward, reduction and update in each step. cpu uses the host's clock, and cuda
    uses device events. Other backends queue whole steps. auto measures on cpu only."""
    profile_steps: tuple[Size, ...] = Field(default=(), strict=False)
    """First and last step that torch's profiler records in logs/profiles, at most 100 steps; empty for none."""
    profile_ranks: tuple[NonNegativeInt, ...] = Field(default=(0,), strict=False)
    """Ranks that are profiled."""


class CompileConfig(Section):
    """[compile]: compiler options and the cache of compiled graphs."""

    cache_dir: GraphFolder = Path("compile_cache/{host}")
    """Folder of this node's compiled graphs, on a local disk. `{host}` becomes the name of the node."""
    allow_network: bool = False
    """Accept a cache_dir on a network file system, where concurrent ranks lose and corrupt cache entries."""
    optlevel: int = Field(default=0, ge=0, le=3)
    """Optimization level of Neuron's compiler, 1 to 3. 0 uses the default of the compiler or of TorchNeuron."""
    max_recompiles: NonNegativeInt = 3
    """Maximum number of recompilations of work that is already compiled. One more ends the run."""
    torch_compile: Literal[False, True, "step"] = False
    """Apply torch.compile to each block, and on CUDA and TorchNeuron also to loss and update. step compiles the whole
    forward and backward pass, which may gather sharded parameters. PyTorch/XLA always compiles."""
    allow_fallbacks: bool = False
    """On neuron-native, accept operations that TorchNeuron runs on the host. Otherwise step 1 ends with exit code 5."""
    manifest: LocalPath = Path("compile_cache/manifests/{name}.json")
    """List of the graphs that `nxtrain compile` has compiled. `{name}` is run.name. A node with only some pipeline
    stages adds `.stages-0`, ..."""
    on_miss: Literal["compile", "stop"] = "compile"
    """Reaction on Neuron devices to a graph outside the manifest: compile it with a warning, or stop with exit code
    5."""


class RecoveryConfig(Section):
    """[recovery]: reaction to failures, hangs and divergence."""

    hang_timeout_s: Seconds = 1800.0
    """Seconds for which a rank may wait for others, or make no progress itself, before the run counts as hung."""
    max_restarts: NonNegativeInt = 0
    """Maximum restarts of failed ranks by the launcher. The count resets when a run gets further than before."""
    in_job: bool = False
    """Replace only lost ranks, within max_restarts. The other ranks keep their processes, and continue from memory
    without a lost step. If no replica has a lost rank's state, all ranks load the newest checkpoint. Works on CPUs and
    GPUs of one machine. A GPU then synchronizes once per step."""
    grace_s: Seconds = 300.0
    """Seconds for ranks to finish a step and save after a stop request, before the launcher kills them. Half of this
    time may go into a copy to checkpoint.mirror. A finished run waits equally long for a rank that is stuck."""
    max_same_step: NonNegativeInt = 3
    """Number of consecutive failures at the same step after which a run refuses to start. 0 never refuses."""
    non_finite: Literal["stop", "skip", "rollback"] = "stop"
    """Reaction to a step with a loss or gradient that is not finite, which updates nothing. stop ends with exit code 6.
    skip continues. rollback ends, and restarted ranks replay the step from the newest checkpoint to find hardware
    faults."""
    vote_every: NonNegativeInt = 0
    """Steps between comparisons of all state that several ranks replicate, also done before checkpoints; 0 for
    never."""
    on_divergence: Literal["warn", "stop", "rollback"] = "warn"
    """Reaction to a gradient norm that stays above three times its lowest value. warn continues. stop ends with exit
    code 6. rollback ends, and restarted ranks resume from an earlier checkpoint and skip the batches since then."""
    debug: Literal["off", "dist"] = "off"
    """dist writes logs of collectives to run.dir/logs/dist. Each collective first finds missing ranks, and torch, NCCL
    and the Neuron runtime log in detail. This costs time at each collective, and changes no result."""
