"""Environment variables of ranks, set before Python starts, since Neuron libraries and OpenMP read them on load."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from nxtrain.backends.attention_choice import AttentionChoice, AttentionShape, choose_torch
from nxtrain.backends.expert_choice import ExpertChoice, ExpertShape
from nxtrain.backends.neuron import torchneuron, torchneuron_names
from nxtrain.backends.neuron.attention import choose
from nxtrain.backends.neuron.experts import choose_experts
from nxtrain.backends.neuron.hardware import FIRST_GENERATION, INSTANCES, this_machine
from nxtrain.backends.neuron.native_attention import SWITCH, choose_native, library_lacking
from nxtrain.backends.neuron.sdk import RECOMMENDED, Package, SdkVersion, detect, installed, support
from nxtrain.common.dimensions import Dimensions
from nxtrain.common.errors import BackendError, ConfigError, Problem
from nxtrain.common.family import ModelConfig, ModelFamily
from nxtrain.common.machines import Machine
from nxtrain.common.process.document import restore_output
from nxtrain.config.cache_dir import cache_folder, lock_folder
from nxtrain.config.check import family_of, resolve_model
from nxtrain.config.decode import nearest
from nxtrain.config.schema import RunConfig
from nxtrain.launch.debug import debug_variables
from nxtrain.launch.environment import CUBLAS_WORKSPACE, Variable, with_shell_values
from nxtrain.launch.gpu import gpu_variables
from nxtrain.launch.native_variables import VISIBLE_CORES, native_environment, rank_variables
from nxtrain.launch.threads import inference_variables, thread_variables
from nxtrain.launch.variables import INSPECT, SOURCES, neuron_environment


@dataclass(frozen=True)
class Needs:
    """Environment variables that the ranks of a run need on Neuron devices.

    Args:
        about: Notes on the instance, the SDK and the sources.
        variables: Environment variables to set.
        problems: Reasons why the run cannot start.
    """

    about: tuple[str, ...] = ()
    variables: tuple[Variable, ...] = ()
    problems: tuple[Problem, ...] = ()


def is_neuron(config: RunConfig) -> bool:
    """True if a run with this configuration on this machine uses Neuron devices."""
    return is_native(config) or config.backend.name == "neuron" or (config.backend.name == "auto" and support().ok)


def is_native(config: RunConfig) -> bool:
    """True if a run with this configuration on this machine uses Neuron devices through TorchNeuron."""
    name = config.backend.name
    return name == "neuron-native" or (name == "auto" and not support().ok and torchneuron.support().ok)


def needs(config: RunConfig, environ: Mapping[str, str], num_ranks: int) -> Needs:
    """Return the environment variables that a run needs on Neuron devices, given the shell's variables."""
    instance = machine_of(config)
    native = is_native(config)
    if instance is None and (config.cluster.instance or not native):
        return Needs(problems=(_unknown(config.cluster.instance),))
    sdk = detect()
    if native:
        sdk = torchneuron.detect()
    assumed = ""
    if sdk is None:
        assumed = ", assumed: it is not installed here"
    problems: list[Problem] = []
    locks = Path()
    try:
        cache = {"cache_dir": cache_folder(config.compile, shared=native)}
        locks = lock_folder(cache["cache_dir"])
        config = config.model_copy(update={"compile": config.compile.model_copy(update=cache)})
    except ConfigError as error:
        problems += error.problems
    about = [f"sources without a host are pages of {SOURCES}"]
    if native:
        environment = native_environment(config, instance, sdk or torchneuron.SDK, locks, torchneuron_names.reads)
        about += environment.notes
    else:
        assert instance is not None
        flash = False
        try:
            attention = attention_of(config, instance, sdk or RECOMMENDED, installed("neuronx-distributed"))
            if attention is not None:
                about.insert(0, str(attention))
                flash = attention.is_flash
        except ConfigError as error:
            problems += error.problems
        environment = neuron_environment(config, instance, sdk or RECOMMENDED, flash=flash)
    about.insert(0, f"{_named(instance)}, Neuron SDK {environment.sdk}{assumed}")
    problems += environment.conflicts(environ)
    if native:
        problems += rank_variables(environ, 0, num_ranks)[1]
    if instance is not None:
        problems += check_machine(config, instance, native=native)
        if num_ranks > instance.devices:
            reason = f"{num_ranks} ranks per machine, but {instance.name} has {instance.devices} cores"
            fits = -(-num_ranks * config.cluster.nodes // instance.devices)
            hint = f"use cluster.nodes={fits} or more, or lower degrees"
            problems.append(Problem("cluster.nodes", reason, hint=hint))
    return Needs(tuple(about), environment.with_shell_values(environ), tuple(problems))


def reexec_with_environment(config: RunConfig, environ: Mapping[str, str], local_world: int) -> None:
    """Re-execute this rank if environment variables are missing, which `nxtrain launch` would have set.

    The process keeps its pid, so its agent sees no change. Without a Neuron device only variables of threads, GPUs and
    `recovery.debug` are added, since the backend reports the missing device with more detail.

    Raises:
        ConfigError: The variables contradict the run.
    """
    wanted = [*gpu_variables(config, environ)]
    wanted += debug_variables(config, environ, neuron=is_neuron(config))
    if is_neuron(config):
        present = support()
        if is_native(config):
            present = torchneuron.support()
        if present.ok:
            # Number of machines that torchrun joined: fewer after a loss, or one although the configuration has more.
            nodes = int(environ.get("GROUP_WORLD_SIZE", config.cluster.nodes))
            config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"nodes": nodes})})
            needed = needs(config, environ, local_world)
            if needed.problems:
                raise ConfigError(needed.problems)
            wanted += needed.variables
            metrics = config.metrics
            if is_native(config):
                wanted += rank_variables(environ, int(environ.get("LOCAL_RANK", 0)), local_world)[0]
            elif metrics.profile_steps and int(environ.get("RANK", 0)) not in metrics.profile_ranks:
                wanted.append(Variable(INSPECT, "0", "not a rank of metrics.profile_ranks"))
    else:
        wanted += thread_variables(config, environ, local_world)
        if config.backend.deterministic:
            wanted += with_shell_values([CUBLAS_WORKSPACE], environ)
    _reexec(wanted, environ)


def reexec_for_inference(
    shape: tuple[ModelFamily, ModelConfig] | None, tokens: int, environ: Mapping[str, str], local_world: int
) -> None:
    """Re-execute a rank of `nxtrain generate`, `eval` or `data teach` if its thread variables are missing.

    The call does nothing on hosts with Neuron devices.
    """
    if support().ok or torchneuron.support().ok:
        return
    _reexec(inference_variables(shape, tokens, environ, local_world), environ)


def _reexec(variables: Iterable[Variable], environ: Mapping[str, str]) -> None:
    """Re-execute this process with environment variables, unless it has them already."""
    complete = {**environ, **{variable.name: variable.value for variable in variables}}
    if complete != environ:
        restore_output()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], complete)


def reexec_on_cores(cores: str, environ: Mapping[str, str], local_rank: int, local_world: int) -> None:
    """Re-execute this rank on its Neuron core of a list, unless its variables are set already.

    Args:
        cores: Neuron cores of all ranks of this machine, such as `0-3,8`.
        environ: Environment variables of this process.
        local_rank: Local rank of this process, its index in the list.
        local_world: Number of ranks of this machine.

    Raises:
        BackendError: This machine has no Neuron devices.
        ConfigError: The list is invalid or too short.
    """
    lanes = [support(), torchneuron.support()]
    if not any(lane.ok for lane in lanes):
        reasons = "; ".join(dict.fromkeys(lane.reason.splitlines()[0] for lane in lanes))
        raise BackendError(f"--visible-cores is for Neuron devices: {reasons}; leave it out")
    variables, problems = rank_variables({VISIBLE_CORES: cores}, local_rank, local_world)
    if problems:
        raise ConfigError([replace(problem, key="--visible-cores", origin="", hint="") for problem in problems])
    _reexec(variables, environ)


def machine_of(config: RunConfig) -> Machine | None:
    """Return the instance type of a run: the configured type, or this machine's; None if nxtrain does not know it."""
    named, here = config.cluster.instance, this_machine()
    if not named or (here is not None and here.name == named):
        return here
    return INSTANCES.get(named)


def attention_of(
    config: RunConfig, instance: Machine | None, sdk: SdkVersion | None, distributed: Package | None
) -> AttentionChoice | None:
    """Choose the attention kernel on an instance with PyTorch/XLA; None if the model's configuration is invalid."""
    shape, chosen = _shape_of(config), config.backend
    if shape is None:
        return None
    return choose(chosen.attention, shape, instance, sdk, distributed, allow_unverified=chosen.allow_unverified)


def announced_attention(config: RunConfig, backend: str, environ: Mapping[str, str]) -> AttentionChoice | None:
    """Return the attention kernel that a run on this machine would choose; None without a choice or a valid model."""
    shape, wanted = _shape_of(config), config.backend.attention
    if shape is None:
        return None
    if backend == "neuron":
        return attention_of(config, machine_of(config), detect(), installed("neuronx-distributed"))
    if backend == "neuron-native":
        instance = machine_of(config)
        lnc = 1 if instance is None else instance.physical_cores
        return choose_native(wanted, shape, switched_off=environ.get(SWITCH) == "0", library=library_lacking(), lnc=lnc)
    return choose_torch(backend, wanted, shape)


def experts_of(config: RunConfig, instance: Machine | None, sdk: SdkVersion | None) -> ExpertChoice | None:
    """Choose the expert kernels of ranks on an instance; None if the model has no experts, or is invalid."""
    dimensions = _dimensions_of(config)
    shape = None if dimensions is None else ExpertShape.of(config, dimensions)
    if shape is None:
        return None
    return choose_experts(config.backend.experts, shape, instance, sdk)


def _shape_of(config: RunConfig) -> AttentionShape | None:
    dimensions = _dimensions_of(config)
    return None if dimensions is None else AttentionShape.of(config, dimensions)


def _dimensions_of(config: RunConfig) -> Dimensions | None:
    try:
        return family_of(config).dimensions(resolve_model(config))
    except ConfigError:  # the check of the configuration reports errors of the model
        return None


def _named(instance: Machine | None) -> str:
    if instance is None:
        return "an instance that nxtrain does not know, whose cores and threads are left to the runtime"
    if not instance.measured:
        return instance.name
    return f"{instance.name}, {instance.devices} logical cores as its driver describes them"


def _unknown(name: str) -> Problem:
    if name:
        reason = f"{name} is not a Trainium instance that nxtrain knows"
        return Problem("cluster.instance", reason, hint=nearest(name, list(INSTANCES)))
    reason = "not set, and this machine is not a Trainium instance that nxtrain knows"
    return Problem("cluster.instance", reason, hint=f"set it to one of {', '.join(INSTANCES)}")


def check_machine(config: RunConfig, machine: Machine, *, native: bool) -> list[Problem]:
    """Return the problems of a Trainium instance that TorchNeuron, or a run on several machines, cannot use."""
    problems = []
    if native and machine.target in FIRST_GENERATION:
        reason = f"{machine.name} has chips of the first generation, and TorchNeuron is for Trn2 and Trn3 only"
        problems.append(Problem("cluster.instance", reason, hint="use trn2.48xlarge, or backend.name=neuron"))
    if config.cluster.nodes > 1 and not machine.efa_devices:
        reason = f"{config.cluster.nodes} machines, but {machine.name} has no EFA device to join them"
        problems.append(Problem("cluster.nodes", reason, hint="use cluster.nodes=1, or trn1.32xlarge"))
    return problems
