"""Environment of a run by PyTorch/XLA on Neuron devices, as a pure function of configuration, instance and SDK.

Sources without a host are pages of https://github.com/aws-neuron/aws-neuron-sdk at 81ce03a. HLAT, at 110d8ad, has the
scripts of AWS's own runs on up to 4096 chips.
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
"""Repository of the sources that are given without a host."""

ROUNDING = "NEURON_RT_STOCHASTIC_ROUNDING_EN"

INSPECT = "NEURON_RT_INSPECT_ENABLE"
"""Variable with which the runtime profiles a whole process."""

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
    """Environment of a configuration on an instance under a release of the SDK, without access to `os.environ`.

    Args:
        flash: True if attention is NKI's kernel.
    """
    flags = _compiler_flags(config, instance, flash=flash)
    barred: tuple[Variable, ...] = ()
    if flash:
        barred = _BESIDE_FLASH
    return Environment(sdk, tuple(_variables(config, instance, sdk)), tuple(flags), barred)


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
            "the types of [precision] hold; compilers differ in their default",
            COMPILER,
            "leave it out and choose the types in [precision]",
        ),
        Variable("--target", instance.target, "a graph compiled on another machine has the same key", COMPILER),
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


def _variables(config: RunConfig, instance: Machine, sdk: SdkVersion) -> list[Variable]:
    variables = [
        Variable(
            "PJRT_DEVICE",
            "NEURON",
            "without it torch-xla takes the CPU where it finds no Neuron library, with no more than a warning",
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
            "NEURON_FUSE_SOFTMAX", "1", "one operation that the compiler knows for softmax", f"{ENVVARS}, {_HLAT}"
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
        reason = "each rank of NeuronX Distributed lists every group of the world at its own default, info"
        variables.append(Variable("NXD_LOG_LEVEL", "warning", reason, _NXD_LOGGER))
    variables += logical_cores(instance)
    if instance.name == "trn1.2xlarge":
        reason = "little host memory: a graph that did not compile beside others is tried alone"
        variables.append(Variable("NEURON_PARALLEL_COMPILE_MAX_RETRIES", "1", reason, ENVVARS))
    return [*variables, *_profile_variables(config), *network_variables(config, instance)]


def rounding_variables(config: RunConfig, *, by_hardware: bool) -> list[Variable]:
    """Variables of the hardware's rounding.

    Args:
        by_hardware: The hardware rounds at random where `precision.update` asks for it.
    """
    stochastic = by_hardware and config.precision.update == "bf16_stochastic"
    reason = f"precision.update={config.precision.update} is made for rounding to nearest"
    if stochastic:
        reason = "the hardware rounds every cast to bf16 at random, as precision.update=bf16_stochastic asks"
    elif config.precision.update == "bf16_stochastic":
        reason = "nxtrain rounds at random itself, by keys that do not depend on the layout, so the hardware must not"
    rounding = Variable(
        ROUNDING,
        str(int(stochastic)),
        reason,
        ENVVARS,
        "unset it; precision.update=bf16_stochastic alone rounds at random, and backend.rounding says by which bits",
    )
    seed = Variable(
        "NEURON_RT_STOCHASTIC_ROUNDING_SEED",
        str(config.run.seed),
        "run.seed on every rank, so that copies of a parameter round alike and a run repeats",
        ENVVARS,
        "unset it and use run.seed",
    )
    if not stochastic:
        return [rounding]
    return [rounding, seed]


def _profile_variables(config: RunConfig) -> list[Variable]:
    """Variables of the runtime's profile, which covers a whole process: it starts before the first step is known."""
    if not config.metrics.profile_steps:
        return []
    ranks = ", ".join(map(str, config.metrics.profile_ranks))
    folder = config.run.dir / LOGS_DIR / PROFILES_DIR / DEVICE_PROFILES_DIR
    return [
        Variable(
            INSPECT,
            "1",
            f"metrics.profile_steps: a profile by the runtime, from start to end of the run; of metrics.profile_ranks "
            f"{ranks} only, since other ranks set 0",
            EXPLORER,
        ),
        Variable(
            "NEURON_RT_INSPECT_OUTPUT_DIR",
            str(folder),
            "run.dir: files for Neuron Explorer, beside the profiles of the hosts",
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
    """Variable with the runtime's time limit: a graph waits in its first collective for ranks that still compile it."""
    return Variable(
        "NEURON_RT_EXEC_TIMEOUT",
        first_use_limit(config),
        "4 x recovery.hang_timeout_s: seconds until work fails that waits for a rank which may be compiling",
        RUNTIME,
        "unset it and use recovery.hang_timeout_s",
    )


def first_use_limit(config: RunConfig) -> str:
    """Whole seconds of the hang limit while graphs compile."""
    return str(math.ceil(first_use_limit_s(config.recovery.hang_timeout_s)))


def host_variables(instance: Machine) -> list[Variable]:
    """Variables that share the host's memory and threads among its ranks."""
    arenas = "host memory: glibc makes up to 8 arenas per core, each with memory of its own"
    threads = instance.host_threads // instance.devices
    return [
        Variable("MALLOC_ARENA_MAX", "64", arenas, "HLAT"),
        Variable("OMP_NUM_THREADS", str(threads), "every rank has its share of the host's threads"),
    ]


def logical_cores(instance: Machine) -> list[Variable]:
    """Variables with the number of physical cores in each logical one."""
    if instance.physical_cores == 1:
        return []
    reason = f"{instance.devices} cores of {instance.physical_cores} physical ones, as graphs are compiled for"
    way_out = f"unset it: nxtrain knows {instance.name} with {instance.devices} cores only"
    names = ("NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE")  # the second is read by older releases
    return [Variable(name, str(instance.physical_cores), reason, _LOGICAL_CORES, way_out) for name in names]


def network_variables(config: RunConfig, instance: Machine | None) -> list[Variable]:
    """Variables of collectives between nodes."""
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
