"""Environment of PyTorch/XLA: packages, refused variables with replacements, and variables of a tracing process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from nxtrain.backends.base import Support
from nxtrain.backends.neuron.sdk import SdkVersion
from nxtrain.common.errors import ConfigError, Problem

EXTRACTION = "NEURON_EXTRACT_GRAPHS_ONLY"
"""Variable that `neuron_parallel_compile` sets to 1: Neuron's plugin collects graphs and computes nothing."""

EXTRACTING = "extracting:"
"""Prefix of rank 0's line with the name of the work whose graphs follow."""

HOLDING = "pipeline stages of this machine:"
"""Prefix of the line with the pipeline stages of a machine that does not hold all stages, before any work."""

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""Variables with the place of a process among the ranks."""

ORIGIN = "environment"
"""Origin of these problems in messages."""

# Pages of https://github.com/aws-neuron/aws-neuron-sdk at 81ce03a.
_ENVVARS = "archive/nxd-training/torch-neuron-envvars.rst"
_EOS = "about-neuron/announcements/neuron2.x"


@dataclass(frozen=True)
class Dead:
    """A variable that must not be set for a run.

    Args:
        name: Variable.
        reason: Effect of the variable, or its lack of any.
        instead: The way out.
        source: Page of the Neuron SDK's documentation.
        since: First release of the Neuron SDK in which the variable is refused; None: on every XLA device.
    """

    name: str
    reason: str
    instead: str
    source: str
    since: SdkVersion | None = None


DEAD = (
    Dead(
        "XLA_USE_BF16",
        "silently stores float32 and float64 tensors as bfloat16, sums and optimizer state among them",
        "unset it and use precision.params=bf16",
        f"{_EOS}/announce-eos-bf16-vars.rst",
    ),
    Dead(
        "XLA_DOWNCAST_BF16",
        "silently stores float32 tensors as bfloat16, sums and optimizer state among them",
        "unset it and use precision.params=bf16 with precision.update=fp32_master",
        f"{_EOS}/announce-eos-bf16-vars.rst",
    ),
    Dead(
        "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS",
        "does nothing from Neuron SDK 2.31 on, where implicit asynchronous execution was removed",
        "unset it; Neuron SDK 2.30 is the last that heeds it",
        f"{_EOS}/announce-no-support-implicit-async-mode.rst",
        since=SdkVersion(2, 31),
    ),
    Dead(
        "NEURONCORE_NUM_DEVICES",
        "is a number of processes for xmp.spawn, and contradicts that of torchrun",
        "unset it and use --nproc or --nproc-per-node",
        _ENVVARS,
        since=SdkVersion(2, 0),
    ),
)


def dead_variables(environ: Mapping[str, str], sdk: SdkVersion | None = None) -> list[Problem]:
    """Problems of all dead variables that are set; `0` and the empty text count as not set.

    Args:
        environ: Environment variables.
        sdk: Release of the Neuron SDK; None: not a Neuron device.
    """
    return [
        Problem(dead.name, f"{environ[dead.name]} {dead.reason}", ORIGIN, dead.instead)
        for dead in DEAD
        if environ.get(dead.name, "0") not in {"", "0"}
        and (dead.since is None or (sdk is not None and sdk >= dead.since))
    ]


def extracting(environ: Mapping[str, str]) -> bool:
    """True if graphs are to be collected for compilation, instead of a run."""
    return environ.get(EXTRACTION) == "1"


def refuse_dead_variables(environ: Mapping[str, str], sdk: SdkVersion | None = None) -> None:
    """Refuse a run with dead variables.

    Raises:
        ConfigError: Some are set; the error has a problem for each.
    """
    problems = dead_variables(environ, sdk)
    if problems:
        raise ConfigError(problems)


def support() -> Support:
    """Support by the installed packages; imports none of them."""
    if find_spec("torch_xla") is None:
        return Support(False, "torch-xla is not installed; pip install 'nxtrain[xla]'")
    return Support(True, "torch-xla is installed")


def trace_environment(environ: Mapping[str, str], local_world: int = 1) -> dict[str, str]:
    """Environment of a tracing process: one CPU device, no other ranks, and no variables that change graphs.

    Args:
        environ: Variables of this process.
        local_world: Ranks of each pretended machine, which NeuronX Distributed reads from the environment.
    """
    prefixes = ("NEURON", "NXD_", "PJRT_", "PT_XLA_", "XLA_", "TORCHELASTIC_")
    kept = {
        name: value for name, value in environ.items() if not name.startswith(prefixes) and name not in RANK_VARIABLES
    }
    added = {"LOCAL_WORLD_SIZE": str(local_world), "NXD_LOG_LEVEL": "warning"}
    return {**kept, **added, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1"}
