"""Environment variables of a run with PyTorch/XLA on Neuron devices, by configuration, instance and SDK.

Sources without a host are pages of https://github.com/aws-neuron/aws-neuron-sdk at 81ce03a. HLAT, at 110d8ad, has the
scripts of AWS's runs on up to 4096 chips.
"""

from __future__ import annotations

import math

from nxtrain.backends.neuron.sdk import SdkVersion
from nxtrain.common.machines import Machine
from nxtrain.common.process.deadlines import first_use_limit_s
from nxtrain.common.run_folder import DEVICE_PROFILES_DIR, LOGS_DIR, PROFILES_DIR
from nxtrain.config.schema import RunConfig
from nxtrain.launch.environment import CACHE, Environment, Variable

SOURCES = "https://github.com/aws-neuron/aws-neuron-sdk"
"""Repository of all sources that are given without a host name."""

ROUNDING = "NEURON_RT_STOCHASTIC_ROUNDING_EN"

INSPECT = "NEURON_RT_INSPECT_ENABLE"
"""Environment variable that makes the Neuron runtime profile the whole process."""

EXPLORER = "tools/neuron-explorer/environment-variables.rst"
ENVVARS = "archive/nxd-training/torch-neuron-envvars.rst"
COMPILER = "compiler/neuronx-cc/api-reference-guide/index.rst"
RUNTIME = "neuron-runtime/guides/configuration-guide.rst"
_MULTI_NODE = "frameworks/torch/torch-neuronx/setup-trn1-multi-node-execution.rst"
_FORK = "neuron-runtime/nrt-troubleshoot.rst"
_LOGICAL_CORES = "about-neuron/arch/neuron-features/logical-neuroncore-config.rst"
_NXD_TRAINING = "release-notes/components/nxd-training.rst"
_HLAT = "https://github.com/awslabs/HLAT"
_NXD = "https://github.com/aws-neuron/neuronx-distributed/blob/v0.18.0/src/neuronx_distributed"
_NXD_LOGGER = f"{_NXD}/utils/logger.py"


def neuron_environment(config: RunConfig, instance: Machine, sdk: SdkVersion, *, flash: bool = False) -> Environment:
    """Build the environment of a run with PyTorch/XLA on Neuron devices, without access to `os.environ`.

    Args:
        config: Configuration of the run.
        instance: Instance type of the machines.
        sdk: Release of the Neuron SDK.
        flash: The run uses NKI's flash attention kernel.
    """
    flags = _compiler_flags(config, instance, flash=flash)
    forbidden: tuple[Variable, ...] = ()
    if flash:
        forbidden = _BESIDE_FLASH
    return Environment(sdk, tuple(_variables(config, instance, sdk)), tuple(flags), forbidden)


_BESIDE_FLASH = (
    Variable(
        "--distribution-strategy",
        "llm-training",
        "must not be combined with NKI kernels, but attention is an NKI kernel",
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


def _compiler_flags(config: RunConfig, instance: Machine, *, flash: bool) -> list[Variable]:
    flags = []
    if config.compile.optlevel:
        way_out = "leave it out and use compile.optlevel"
        flags.append(Variable("--optlevel", str(config.compile.optlevel), "compile.optlevel", COMPILER, way_out))
    flags += [
        Variable("--model-type", "transformer", "optimizations for transformers", COMPILER),
        Variable(
            "--auto-cast",
            "none",
            "the types of [precision] are kept; the default differs between compilers",
            COMPILER,
            "leave it out and choose the types in [precision]",
        ),
        Variable("--target", instance.target, "a graph compiled on another machine has the same key", COMPILER),
        Variable(
            "--retry_failed_compilation",
            "",
            "a compilation that failed before, such as for lack of host memory, is tried again",
            "about-neuron/arch/neuron-features/neuron-caching.rst",
        ),
    ]
    if instance.physical_cores > 1:
        reason = f"graphs for logical cores of {instance.physical_cores} physical cores, as in the runtime"
        flags.append(Variable("--logical-nc-config", str(instance.physical_cores), reason, _LOGICAL_CORES))
    if config.model.preset.startswith("llama2") and not flash:
        reason = "AWS uses it for Llama 2, measured other models slower with it, and forbids it with NKI kernels"
        source = f"{_NXD_TRAINING}, 1.1.0 and 1.2.0"
        flags.append(Variable("--distribution-strategy", "llm-training", reason, source))
    return flags


def _variables(config: RunConfig, instance: Machine, sdk: SdkVersion) -> list[Variable]:
    variables = [
        Variable(
            "PJRT_DEVICE",
            "NEURON",
            "otherwise torch-xla uses the CPU if it finds no Neuron library, with a warning only",
            "https://github.com/pytorch/xla/blob/v2.9.0/torch_xla/runtime.py",
            "unset it, or use backend.name=xla",
        ),
        *rounding_variables(config, by_hardware=config.backend.rounding != "software"),
        Variable(
            "XLA_DISABLE_FUNCTIONALIZATION",
            "0",
            "torch-neuronx sets 1, under which tensor.split returns wrong values and ZeRO-1 converges worse",
            f"release-notes/components/pytorch.rst, {ENVVARS}, https://github.com/pytorch/xla/issues/8640",
            "unset it",
        ),
        Variable(
            "NEURON_FUSE_SOFTMAX", "1", "softmax is one operation, which the compiler knows", f"{ENVVARS}, {_HLAT}"
        ),
        execution_limit(config),
        Variable(
            CACHE,
            str(config.compile.cache_dir),
            "compile.cache_dir: compiled graphs",
            "about-neuron/arch/neuron-features/neuron-caching.rst",
            "unset it and use compile.cache_dir",
        ),
        *host_variables(instance),
    ]
    if sdk < SdkVersion(2, 31):
        reason = "backend.in_flight: the host runs ahead of the device; more graphs in flight may run out of memory"
        in_flight = str(config.backend.in_flight)
        variables.append(Variable("NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS", in_flight, reason, RUNTIME))
    if config.backend.layers != "native":
        reason = "at its default, info, each rank of NeuronX Distributed logs every process group of the world"
        variables.append(Variable("NXD_LOG_LEVEL", "warning", reason, _NXD_LOGGER))
    variables += logical_cores(instance)
    if instance.name == "trn1.2xlarge":
        reason = "little host memory: a graph that failed to compile in parallel is tried alone"
        variables.append(Variable("NEURON_PARALLEL_COMPILE_MAX_RETRIES", "1", reason, ENVVARS))
    return [*variables, *_profile_variables(config), *network_variables(config, instance)]


def rounding_variables(config: RunConfig, *, by_hardware: bool) -> list[Variable]:
    """Environment variables of the hardware's stochastic rounding.

    Args:
        config: Configuration of the run.
        by_hardware: The hardware does the stochastic rounding of `precision.update=bf16_stochastic`.
    """
    stochastic = by_hardware and config.precision.update == "bf16_stochastic"
    reason = f"precision.update={config.precision.update} needs rounding to nearest"
    if stochastic:
        reason = "the hardware rounds every cast to bf16 stochastically, for precision.update=bf16_stochastic"
    elif config.precision.update == "bf16_stochastic":
        reason = "nxtrain rounds stochastically itself, by keys independent of the layout, so the hardware must not"
    rounding = Variable(
        ROUNDING,
        str(int(stochastic)),
        reason,
        ENVVARS,
        "unset it; precision.update=bf16_stochastic enables stochastic rounding, and backend.rounding its generator",
    )
    seed = Variable(
        "NEURON_RT_STOCHASTIC_ROUNDING_SEED",
        str(config.run.seed),
        "run.seed on every rank, so that replicas of a parameter round equally and a run is reproducible",
        ENVVARS,
        "unset it and use run.seed",
    )
    if not stochastic:
        return [rounding]
    return [rounding, seed]


def _profile_variables(config: RunConfig) -> list[Variable]:
    """Environment variables of the Neuron runtime's profile, which covers the whole process."""
    if not config.metrics.profile_steps:
        return []
    ranks = ", ".join(map(str, config.metrics.profile_ranks))
    folder = config.run.dir / LOGS_DIR / PROFILES_DIR / DEVICE_PROFILES_DIR
    return [
        Variable(
            INSPECT,
            "1",
            f"metrics.profile_steps: a profile by the runtime of the whole run; other ranks than metrics.profile_ranks "
            f"{ranks} set 0",
            EXPLORER,
        ),
        Variable(
            "NEURON_RT_INSPECT_OUTPUT_DIR",
            str(folder),
            "run.dir: files for Neuron Explorer, next to the profiles of the hosts",
            EXPLORER,
            "unset it and use run.dir",
        ),
        Variable(
            "NEURON_RT_INSPECT_DEVICE_PROFILE",
            "0",
            "calls and graphs with their times; 1 adds instructions of each graph's first run, and takes device memory",
            EXPLORER,
        ),
    ]


def execution_limit(config: RunConfig) -> Variable:
    """Environment variable with the runtime's time limit of a graph, which may wait for ranks that still compile."""
    return Variable(
        "NEURON_RT_EXEC_TIMEOUT",
        first_use_limit(config),
        "4 x recovery.hang_timeout_s: seconds until a graph fails that waits for a rank, which may be compiling",
        RUNTIME,
        "unset it and use recovery.hang_timeout_s",
    )


def first_use_limit(config: RunConfig) -> str:
    """Hang limit while graphs may compile, in whole seconds, as text."""
    return str(math.ceil(first_use_limit_s(config.recovery.hang_timeout_s)))


def host_variables(instance: Machine) -> list[Variable]:
    """Environment variables that divide the host's memory and threads among its ranks."""
    arenas = "host memory: glibc creates up to 8 arenas per core, each with its own memory"
    threads = instance.host_threads // instance.devices
    return [
        Variable("MALLOC_ARENA_MAX", "64", arenas, "HLAT"),
        Variable("OMP_NUM_THREADS", str(threads), "every rank has its share of the host's threads"),
    ]


def logical_cores(instance: Machine) -> list[Variable]:
    """Environment variables with the number of physical cores per logical core."""
    if instance.physical_cores == 1:
        return []
    reason = f"{instance.devices} logical cores of {instance.physical_cores} physical cores, as in compiled graphs"
    way_out = f"unset it: nxtrain knows {instance.name} with {instance.devices} cores only"
    names = ("NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE")  # the second is read by older releases
    return [Variable(name, str(instance.physical_cores), reason, _LOGICAL_CORES, way_out) for name in names]


def network_variables(config: RunConfig, instance: Machine | None) -> list[Variable]:
    """Environment variables of collectives between nodes."""
    if config.cluster.nodes == 1:
        return []
    devices = "EFA"
    if instance is not None:
        devices = f"{instance.efa_devices} EFA devices"
    reason = f"collectives between nodes go over {devices}"
    way_out = "unset it: nodes train together over EFA only"
    direct = "EFA reads and writes device memory without a copy on the host"
    return [
        Variable("FI_PROVIDER", "efa", reason, _MULTI_NODE, way_out),
        Variable("FI_EFA_USE_DEVICE_RDMA", "1", direct, _MULTI_NODE, way_out),
        Variable("FI_EFA_FORK_SAFE", "1", "libfabric fails on kernels before 5.15 without it", _FORK),
    ]
