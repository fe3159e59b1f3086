"""Inputs of the compile cache's keys for a run: compiler version, compiler flags, and settings that shape graphs.

Some inputs are known to the compiler only.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from nxtrain.backends.neuron.sdk import installed
from nxtrain.config.check import Resolved
from nxtrain.config.load import values
from nxtrain.config.schedule import ScheduleConfig
from nxtrain.tools.compile.entries import NEFF_FOLDER
from nxtrain.tools.compile.manifest import Build

FLAGS = "NEURON_CC_FLAGS"
CACHE_FLAGS = ("--cache_dir", "--no_cache", "--retry_failed_compilation", "--log_level", "--dump", "--compile_workdir")
"""Flags that control the compile cache and not the compiler, so that no cache key depends on them.

Source: AWS Neuron documentation, "Neuron Persistent Cache", and the help of `neuron_parallel_compile`.
"""

VARIABLES = ("NEURON_FUSE_SOFTMAX", "NEURON_CUSTOM_SILU", "XLA_DISABLE_FUNCTIONALIZATION")
"""Environment variables that change the graphs into which torch-neuronx lowers the same step."""

NATIVE_VARIABLES = ("NEURON_COMPILER_OPT_LEVEL", "NEURON_LOGICAL_NC_CONFIG")
"""Environment variables that are part of the cache keys of TorchNeuron's graphs."""

COMPILERS = ("neuronx-cc", "nki")
"""Packages with the compilers of TorchNeuron's graphs."""

PACKAGES = ("nxtrain", "torch", "torch-xla", "torch-neuronx", "neuronx-distributed")
"""Packages whose version can change a graph although all settings are equal."""

_FREE = ("run", "cluster", "checkpoint", "compile", "data", "metrics", "model", "recovery")
"""Configuration sections that no graph depends on; for `model`, the resolved model configuration counts."""
_FREE_KEYS = {
    *("backend.name", "train.steps", "train.epochs", "train.eval_batches"),
    *(f"optim.{key}" for key in ScheduleConfig.model_fields),
}
_OPTIONAL = ("train.eval_every", "checkpoint.every", "recovery.vote_every")
"""Interval settings of which a graph depends only on being set or not, never on the value."""


def build_of(plan: Resolved, world: int, environ: Mapping[str, str], compiler: str = "") -> Build:
    """Collect the inputs of the cache keys for a run.

    Args:
        world: Number of ranks.
        environ: Environment variables of the run.
        compiler: Folder name of the compiler's version; empty if unknown. TorchNeuron's files do not name a compiler,
            so the compilers' versions become settings there.
    """
    given = values(plan.config)
    settings = {
        key: value
        for key, value in given.items()
        if key.split(".")[0] not in _FREE and key not in _FREE_KEYS and key not in _OPTIONAL
    }
    parallel = plan.config.parallel
    settings["parallel.dp"] = world // parallel.ranks_per_replica
    for key in _OPTIONAL:
        settings[key] = "never"
        if given[key]:
            settings[key] = "set"
    for key in ("data.doc_mask", "data.teacher_k", "model.fused_qkv", "model.fused_gate_up"):
        settings[key] = given[key]
    for key, value in plan.model.model_dump(mode="json").items():
        settings[f"model.config.{key}"] = value
    variables, packages = [*VARIABLES], [*PACKAGES]
    if compiler == NEFF_FOLDER:
        variables += NATIVE_VARIABLES
        packages += COMPILERS
    settings |= {name: environ[name] for name in variables if name in environ}
    for name in packages:
        package = installed(name)
        if package is not None:
            settings[f"version of {package.name}"] = package.version
    for key, value in settings.items():
        if not isinstance(value, (str, int, float, bool)):
            settings[key] = repr(value)
    return Build(compiler, _flags(environ.get(FLAGS, "")), settings)


def _flags(text: str) -> tuple[str, ...]:
    """Compiler flags without the cache flags, in their order, each followed by its value."""
    flags: list[str] = []
    of_cache = False
    for token in shlex.split(text):
        if token.startswith("-"):
            of_cache = token.partition("=")[0] in CACHE_FLAGS
        if not of_cache:
            flags.append(token)
    return tuple(flags)
