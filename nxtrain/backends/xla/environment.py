"""Environment of PyTorch/XLA: package check, refused environment variables, and variables of tracing processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from nxtrain.backends.base import Support
from nxtrain.backends.neuron.sdk import SdkVersion
from nxtrain.common.errors import ConfigError, Problem

EXTRACTION = "NEURON_EXTRACT_GRAPHS_ONLY"
"""Environment variable that `neuron_parallel_compile` sets to 1: Neuron's plugin extracts graphs, runs nothing."""

EXTRACTING = "extracting:"
"""Prefix of rank 0's output line that names the part of a run whose graphs are extracted next."""

HOLDING = "pipeline stages of this machine:"
"""Prefix of the first output line with a machine's pipeline stages, if the machine does not hold all stages."""

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""Environment variables with the ranks of a process, as torchrun sets them."""

ORIGIN = "environment"
"""Origin of refused variables in error messages, as of a configuration problem."""

# Pages of https://github.com/aws-neuron/aws-neuron-sdk at 81ce03a.
_ENVVARS = "archive/nxd-training/torch-neuron-envvars.rst"
_EOS = "about-neuron/announcements/neuron2.x"


@dataclass(frozen=True)
class RefusedVariable:
    """Environment variable that nxtrain refuses, since it is harmful or has no effect.

    Args:
        name: Name of the variable.
        reason: Harm of the variable, or that it has no effect.
        instead: Replacement, as a hint for the user.
        source: Page of the Neuron SDK's documentation.
        since: First release of the Neuron SDK in which the variable is refused; None for all XLA devices.
    """

    name: str
    reason: str
    instead: str
    source: str
    since: SdkVersion | None = None


DEAD = (
    RefusedVariable(
        "XLA_USE_BF16",
        "silently stores float32 and float64 tensors as bfloat16, sums and optimizer state among them",
        "unset it and use precision.params=bf16",
        f"{_EOS}/announce-eos-bf16-vars.rst",
    ),
    RefusedVariable(
        "XLA_DOWNCAST_BF16",
        "silently stores float32 tensors as bfloat16, sums and optimizer state among them",
        "unset it and use precision.params=bf16 with precision.update=fp32_master",
        f"{_EOS}/announce-eos-bf16-vars.rst",
    ),
    RefusedVariable(
        "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS",
        "does nothing from Neuron SDK 2.31 on, where implicit asynchronous execution was removed",
        "unset it; Neuron SDK 2.30 is the last release that reads it",
        f"{_EOS}/announce-no-support-implicit-async-mode.rst",
        since=SdkVersion(2, 31),
    ),
    RefusedVariable(
        "NEURONCORE_NUM_DEVICES",
        "is a number of processes for xmp.spawn, and contradicts that of torchrun",
        "unset it and use --nproc or --nproc-per-node",
        _ENVVARS,
        since=SdkVersion(2, 0),
    ),
)


def refused_variables(environ: Mapping[str, str], sdk: SdkVersion | None = None) -> list[Problem]:
    """Return a problem for each refused variable that is set; `0` and the empty string count as not set.

    Args:
        environ: Environment variables.
        sdk: Release of the Neuron SDK; None for other XLA devices.
    """
    return [
        Problem(dead.name, f"{environ[dead.name]} {dead.reason}", ORIGIN, dead.instead)
        for dead in DEAD
        if environ.get(dead.name, "0") not in {"", "0"}
        and (dead.since is None or (sdk is not None and sdk >= dead.since))
    ]


def extracting(environ: Mapping[str, str]) -> bool:
    """True if this process extracts graphs under `neuron_parallel_compile` instead of training."""
    return environ.get(EXTRACTION) == "1"


def refuse_dead_variables(environ: Mapping[str, str], sdk: SdkVersion | None = None) -> None:
    """Raise an error if refused environment variables are set.

    Raises:
        ConfigError: Refused variables are set; the error has a problem for each.
    """
    problems = refused_variables(environ, sdk)
    if problems:
        raise ConfigError(problems)


def support() -> Support:
    """Check if torch-xla is installed, without an import of it."""
    if find_spec("torch_xla") is None:
        return Support(False, "torch-xla is not installed; pip install 'nxtrain[xla]'")
    return Support(True, "torch-xla is installed")


def trace_environment(environ: Mapping[str, str], local_world: int = 1) -> dict[str, str]:
    """Environment variables of a tracing process: one CPU device, no other ranks, no variables that change graphs.

    Args:
        environ: Environment variables of this process.
        local_world: Ranks per simulated machine, which NeuronX Distributed reads from the environment.
    """
    prefixes = ("NEURON", "NXD_", "PJRT_", "PT_XLA_", "XLA_", "TORCHELASTIC_")
    kept = {
        name: value for name, value in environ.items() if not name.startswith(prefixes) and name not in RANK_VARIABLES
    }
    added = {"LOCAL_WORLD_SIZE": str(local_world), "NXD_LOG_LEVEL": "warning"}
    return {**kept, **added, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1"}
