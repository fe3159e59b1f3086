"""Environment variables of a run on TorchNeuron, a pure function of configuration, instance, SDK and known names.

TorchNeuron passes `--model-type transformer --auto-cast=none` to the compiler. It assigns each rank the core of its
local rank, and the address of rank 0. The launcher repeats none of these settings, since the text of the compiler flags
is part of the cache key of every graph: a repeated flag would prevent runs from sharing a cache.

Sources: torch/reference/env-vars.html in https://awsdocs-neuron.readthedocs-hosted.com/en/latest, of SDK 2.33. Pages of
https://github.com/aws-neuron/aws-neuron-sdk at 81ce03a have no host. A name without a page of AWS is probed: the
launcher sets the variable only if the installed packages contain its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import PurePath

from nxtrain.backends.neuron.sdk import SdkVersion
from nxtrain.common.errors import Problem
from nxtrain.common.machines import Machine
from nxtrain.config.schema import RunConfig
from nxtrain.launch.environment import NATIVE_CACHE, Environment, Variable
from nxtrain.launch.variables import (
    COMPILER,
    EXPLORER,
    INSPECT,
    RUNTIME,
    execution_limit,
    first_use_limit,
    host_variables,
    logical_cores,
    network_variables,
    rounding_variables,
)

Reads = Callable[[str], bool | None]
"""Function that returns True if the installed packages read a variable; None if no packages are installed."""

VISIBLE_CORES, GIVEN_CORES = "NEURON_RT_VISIBLE_CORES", "NXTRAIN_VISIBLE_CORES"
"""Environment variables with the cores of one process, for the runtime, and of all ranks, as set in the shell."""

FOLDERS = {"graphs": "neff", "HLO": "hlo", "kernels": "nki"}
"""Subfolders of compile.cache_dir by their content."""

_PAGE = "https://awsdocs-neuron.readthedocs-hosted.com/en/latest/torch/reference/env-vars.html"
_PROBED = "the installed torch-neuronx; AWS's pages that nxtrain knows do not name it"


def native_environment(
    config: RunConfig, instance: Machine | None, sdk: SdkVersion, locks: PurePath, reads: Reads
) -> Environment:
    """Build the environment of a run on TorchNeuron, without access to `os.environ`.

    Args:
        config: Configuration of the run.
        instance: Instance type of the machine; None if unknown: the runtime then chooses cores and threads.
        sdk: Release of the Neuron SDK.
        locks: Folder of compilation locks, on a disk of the machine.
        reads: Function that checks if the installed packages read a variable.
    """
    variables = [
        *rounding_variables(config, by_hardware=config.backend.rounding == "hardware"),
        execution_limit(config),
        Variable(
            NATIVE_CACHE,
            str(config.compile.cache_dir / FOLDERS["graphs"]),
            "compile.cache_dir: compiled operations and graphs, which a reboot of the machine would otherwise delete",
            _PAGE,
            "unset it and use compile.cache_dir",
        ),
        Variable(
            "TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION",
            "1",
            "a graph that does not compile ends the run; op by op it would run many times slower without a warning",
            _PAGE,
            "unset it, or use compile.torch_compile=false to run op by op",
        ),
    ]
    notes = []
    for variable in _uncertain(config, locks):
        names = (variable.name, *_OTHER_NAMES.get(variable.name, ()))
        answers = {name: reads(name) for name in names}
        if None in answers.values():
            reason = f"{variable.reason}; set if torch-neuronx on the instance reads it"
            variables.append(replace(variable, reason=reason))
        elif any(answers.values()):
            variables += [replace(variable, name=name) for name, is_read in answers.items() if is_read]
        else:
            notes.append(f"left out: {' or '.join(names)} ({variable.reason}): nothing installed reads it")
    if instance is not None:
        variables += [*host_variables(instance), *logical_cores(instance)]
    variables += network_variables(config, instance)
    forbidden: tuple[Variable, ...] = ()
    if config.metrics.profile_steps:
        forbidden = _BESIDE_PROFILER
    return Environment(sdk, tuple(variables), (), forbidden, xla=False, passed=_PASSED, notes=tuple(notes))


def rank_variables(
    environ: Mapping[str, str], local_rank: int, local_world: int
) -> tuple[list[Variable], list[Problem]]:
    """Environment variables that differ between ranks of a machine, and problems of the shell's visible cores."""
    shown = environ.get(GIVEN_CORES) or environ.get(VISIBLE_CORES, "")
    if not shown:
        if local_world > 1:
            return [], []  # TorchNeuron gives each rank its core
        reason = "one rank uses one logical core, where the runtime would claim all of the machine"
        return [Variable("NEURON_RT_NUM_CORES", "1", reason, RUNTIME)], []
    cores: list[int] = []
    try:
        for part in shown.split(","):
            first, _, last = part.strip().partition("-")
            cores += range(int(first), int(last or first) + 1)
    except ValueError:
        return [], [Problem(VISIBLE_CORES, f"{shown} is not a list of cores such as 0-3,8", "environment", "unset it")]
    if len(cores) < local_world:
        reason = f"{shown} shows {len(cores)} cores, but {local_world} ranks of this machine need one each"
        return [], [Problem(VISIBLE_CORES, reason, "environment", f"show {local_world} cores, or unset it")]
    reason = f"core of local rank {local_rank} among {shown}: a process that sees several takes them all"
    given = Variable(GIVEN_CORES, shown, "cores of all ranks, as the shell has them")
    return [given, Variable(VISIBLE_CORES, str(cores[local_rank]), reason, RUNTIME)], []


_OTHER_NAMES = {"TORCH_NEURONX_ENABLE_HOST_CC": ("NEURON_RT_ENABLE_HOST_CC",)}
"""Other names of the same variable, of which releases read one or several."""


def _uncertain(config: RunConfig, locks: PurePath) -> list[Variable]:
    """Environment variables with little documentation, which are set only if the installed packages read them."""
    root, folders = config.compile.cache_dir, "unset it and use compile.cache_dir"
    variables = [
        Variable(
            "TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR",
            str(locks),
            "locks of compilations, by default in a folder of /tmp that all users and jobs of a machine share",
            _PROBED,
            folders,
        ),
        Variable(
            "TORCH_NEURONX_NEFF_CACHE_LOCK_TIMEOUT",
            first_use_limit(config),
            "4 x recovery.hang_timeout_s: seconds that ranks wait for the rank that compiles their graph",
            _PROBED,
            "unset it and use recovery.hang_timeout_s",
        ),
        Variable("TORCH_NEURONX_HLO_CACHE_DIR", str(root / FOLDERS["HLO"]), "lowered graphs", _PROBED, folders),
        Variable(
            "NKI_COMPILE_CACHE_URL",
            str(root / FOLDERS["kernels"]),
            "compiled kernels, separate from other releases and users",
            _PROBED,
            folders,
        ),
        Variable(
            "TORCH_NEURONX_ENABLE_HOST_CC",
            "1",
            "collectives run on a separate stream, in parallel with the computation",
            EXPLORER,
        ),
        Variable(
            "TORCH_NEURONX_ENABLE_ASYNC_NRT",
            "1",
            "the runtime queues work asynchronously, so that collectives overlap with the computation",
            EXPLORER,
        ),
    ]
    if config.compile.optlevel:
        level = f"-O{config.compile.optlevel}"
        way_out = "unset it and use compile.optlevel"
        variables.append(Variable("NEURON_COMPILER_OPT_LEVEL", level, "compile.optlevel", _PROBED, way_out))
    return variables


def _passed(name: str, instead: str) -> Variable:
    reason = "repeats what the compiler gets anyway; the text of the flags is part of every key, and caches would split"
    return Variable(name, "", reason, COMPILER, instead)


_PASSED = (
    _passed("--auto-cast", "leave it out and choose the types in [precision]"),
    _passed("--model-type", "leave it out"),
    _passed("--target", "leave it out: TorchNeuron compiles for the chip that it finds"),
    _passed("--logical-nc-config", "leave it out"),
    _passed("--optlevel", "leave it out and use compile.optlevel"),
)


_BESIDE_PROFILER = (
    Variable(
        INSPECT,
        "1",
        "profiles the whole process, which AWS rules out with torch's profiler, as metrics.profile_steps starts it",
        EXPLORER,
        "unset it, or use metrics.profile_steps=[]",
    ),
)
