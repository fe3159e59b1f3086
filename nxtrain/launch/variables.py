"""Environment of a run on Neuron devices, as a pure function of configuration, instance and SDK.

There are two: one for PyTorch/XLA (backend.name=neuron), one for TorchNeuron (neuron-native).

Sources without a host are pages of https://github.com/aws-neuron/aws-neuron-sdk at 81ce03a. HLAT, at 110d8ad, has the
scripts of AWS's own runs on up to 4096 chips.
"""

from __future__ import annotations

import math

from nxtrain.backends.neuron.hardware import Instance
from nxtrain.backends.neuron.sdk import SdkVersion
from nxtrain.config.schema import RunConfig
from nxtrain.launch.environment import CACHE, NATIVE_CACHE, Environment, Variable

SOURCES = "https://github.com/aws-neuron/aws-neuron-sdk"
"""Repository of the sources that are given without a host."""

ROUNDING = "NEURON_RT_STOCHASTIC_ROUNDING_EN"

_ENVVARS = "archive/nxd-training/torch-neuron-envvars.rst"
_COMPILER = "compiler/neuronx-cc/api-reference-guide/index.rst"
_RUNTIME = "neuron-runtime/guides/configuration-guide.rst"
_MULTI_NODE = "frameworks/torch/torch-neuronx/setup-trn1-multi-node-execution.rst"
_FORK = "neuron-runtime/nrt-troubleshoot.rst"
_LOGICAL_CORES = "about-neuron/arch/neuron-features/logical-neuroncore-config.rst"
_NXD_TRAINING = "release-notes/components/nxd-training.rst"
_HLAT = "https://github.com/awslabs/HLAT"
_NXD = "https://github.com/aws-neuron/neuronx-distributed/blob/v0.18.0/src/neuronx_distributed"
_NXD_LOGGER = f"{_NXD}/utils/logger.py"


def neuron_environment(config: RunConfig, instance: Instance, sdk: SdkVersion, *, flash: bool = False) -> Environment:
    """Environment of a configuration on an instance under a release of the SDK, without access to `os.environ`.

    Args:
        config: Configuration of the run.
        instance: Instance type of the machine.
        sdk: Release of the Neuron SDK.
        flash: True if attention is NKI's kernel.
    """
    flags = _compiler_flags(config, instance, flash=flash)
    return Environment(sdk, tuple(_variables(config, instance, sdk)), tuple(flags), _BESIDE_FLASH if flash else ())


def native_environment(config: RunConfig, instance: Instance, sdk: SdkVersion) -> Environment:
    """Environment for TorchNeuron, which chooses the other compiler flags itself and ignores XLA's variables."""
    return Environment(sdk, tuple(_native_variables(config, instance)), (_AUTO_CAST,), xla=False)


_AUTO_CAST = Variable(
    "--auto-cast",
    "none",
    "the types of [precision] hold; compilers differ in their default",
    _COMPILER,
    "leave it out and choose the types in [precision]",
)


_BESIDE_FLASH = (
    Variable(
        "--distribution-strategy",
        "llm-training",
        "may not stand beside NKI kernels, and attention is one",
        f"{_NXD_TRAINING}, 1.2.0",
        "leave it out, or use backend.attention=plain",
    ),
    Variable(
        "XLA_DOWNCAST_BF16",
        "0",
        "makes NeuronX Distributed's flash attention keep its sums of exponentials in bf16",
        f"{_NXD}/kernels/flash_attn.py",
        "unset it",
    ),
)


def _compiler_flags(config: RunConfig, instance: Instance, *, flash: bool) -> list[Variable]:
    flags = [
        Variable("--model-type", "transformer", "optimizations for transformers", _COMPILER),
        _AUTO_CAST,
        Variable("--target", instance.target, "a graph compiled on another machine has the same key", _COMPILER),
        Variable(
            "--retry_failed_compilation",
            "",
            "a failure that the cache remembers, such as one for want of host memory, is tried again",
            "about-neuron/arch/neuron-features/neuron-caching.rst",
        ),
    ]
    if instance.physical_cores > 1:
        reason = f"graphs for cores of {instance.physical_cores} physical ones, as the runtime has them"
        flags.append(Variable("--logical-nc-config", str(instance.physical_cores), reason, _LOGICAL_CORES))
    if config.model.preset.startswith("llama2") and not flash:
        reason = "AWS keeps it for Llama 2, found other models slower with it, and bars it beside NKI kernels"
        source = f"{_NXD_TRAINING}, 1.1.0 and 1.2.0"
        flags.append(Variable("--distribution-strategy", "llm-training", reason, source))
    return flags


def _variables(config: RunConfig, instance: Instance, sdk: SdkVersion) -> list[Variable]:
    variables = [
        Variable(
            "PJRT_DEVICE",
            "NEURON",
            "without it torch-xla takes the CPU where it finds no Neuron library, with no more than a warning",
            "https://github.com/pytorch/xla/blob/v2.9.0/torch_xla/runtime.py",
            "unset it, or use backend.name=xla",
        ),
        *_rounding(config),
        Variable(
            "XLA_DISABLE_FUNCTIONALIZATION",
            "0",
            "torch-neuronx sets 1, under which tensor.split returns wrong values and ZeRO-1 converges worse",
            f"release-notes/components/pytorch.rst, {_ENVVARS}, https://github.com/pytorch/xla/issues/8640",
            "unset it",
        ),
        Variable(
            "NEURON_FUSE_SOFTMAX", "1", "one operation that the compiler knows for softmax", f"{_ENVVARS}, {_HLAT}"
        ),
        _hang_timeout(config),
        Variable(
            CACHE,
            str(config.compile.cache_dir),
            "compile.cache_dir: compiled graphs",
            "about-neuron/arch/neuron-features/neuron-caching.rst",
            "unset it and use compile.cache_dir",
        ),
        *_host(instance),
    ]
    if sdk < SdkVersion(2, 31):
        reason = "backend.in_flight: the host runs ahead of the device; more graphs in flight may run out of memory"
        in_flight = str(config.backend.in_flight)
        variables.append(Variable("NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS", in_flight, reason, _RUNTIME))
    if config.backend.layers != "native":
        reason = "each rank of NeuronX Distributed lists every group of the world at its own default, info"
        variables.append(Variable("NXD_LOG_LEVEL", "warning", reason, _NXD_LOGGER))
    variables += _logical_cores(instance)
    if instance.name == "trn1.2xlarge":
        reason = "little host memory: a graph that did not compile beside others is tried alone"
        variables.append(Variable("NEURON_PARALLEL_COMPILE_MAX_RETRIES", "1", reason, _ENVVARS))
    return [*variables, *_network(config, instance)]


def _rounding(config: RunConfig) -> list[Variable]:
    stochastic = config.precision.update == "bf16_stochastic"
    rounding = Variable(
        ROUNDING,
        "1" if stochastic else "0",
        "the hardware rounds every cast to bf16 at random, as precision.update=bf16_stochastic asks"
        if stochastic
        else f"precision.update={config.precision.update} is made for rounding to nearest",
        _ENVVARS,
        "unset it; precision.update=bf16_stochastic alone rounds at random",
    )
    seed = Variable(
        "NEURON_RT_STOCHASTIC_ROUNDING_SEED",
        str(config.run.seed),
        "run.seed on every rank, so that copies of a parameter round alike and a run repeats",
        _ENVVARS,
        "unset it and use run.seed",
    )
    return [rounding, seed] if stochastic else [rounding]


def _hang_timeout(config: RunConfig) -> Variable:
    return Variable(
        "NEURON_RT_EXEC_TIMEOUT",
        str(math.ceil(config.recovery.hang_timeout_s)),
        "recovery.hang_timeout_s: seconds until a graph that waits for a lost peer fails",
        _RUNTIME,
        "unset it and use recovery.hang_timeout_s",
    )


def _host(instance: Instance) -> list[Variable]:
    arenas = "host memory: glibc makes up to 8 arenas per core, each with memory of its own"
    threads = instance.host_threads // instance.num_cores
    return [
        Variable("MALLOC_ARENA_MAX", "64", arenas, "HLAT"),
        Variable("OMP_NUM_THREADS", str(threads), "every rank has its share of the host's threads"),
    ]


def _logical_cores(instance: Instance) -> list[Variable]:
    if instance.physical_cores == 1:
        return []
    reason = f"{instance.num_cores} cores of {instance.physical_cores} physical ones, as graphs are compiled for"
    way_out = f"unset it: nxtrain knows {instance.name} with {instance.num_cores} cores only"
    names = ("NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE")  # the second is read by older releases
    return [Variable(name, str(instance.physical_cores), reason, _LOGICAL_CORES, way_out) for name in names]


def _network(config: RunConfig, instance: Instance) -> list[Variable]:
    if config.cluster.nodes == 1:
        return []
    reason = f"collectives between nodes go over {instance.efa_devices} EFA devices"
    way_out = "unset it: nodes train together over EFA only"
    direct = "EFA reads and writes device memory without a copy on the host"
    return [
        Variable("FI_PROVIDER", "efa", reason, _MULTI_NODE, way_out),
        Variable("FI_EFA_USE_DEVICE_RDMA", "1", direct, _MULTI_NODE, way_out),
        Variable("FI_EFA_FORK_SAFE", "1", "libfabric fails on kernels before 5.15 without it", _FORK),
    ]


def _native_variables(config: RunConfig, instance: Instance) -> list[Variable]:
    return [
        Variable(
            ROUNDING,
            "0",
            "nxtrain rounds at random itself, where precision.update asks for it, so the hardware must not",
            "about-neuron/arch/neuron-features/rounding-modes.rst",
            "unset it and use precision.update",
        ),
        _hang_timeout(config),
        Variable(
            NATIVE_CACHE,
            str(config.compile.cache_dir),
            "compile.cache_dir: compiled operations and blocks, which a restart of the machine would lose otherwise",
            "https://awsdocs-neuron.readthedocs-hosted.com/en/latest/torch/reference/env-vars.html",
            "unset it and use compile.cache_dir",
        ),
        *_host(instance),
        *_logical_cores(instance),
        *_network(config, instance),
    ]
