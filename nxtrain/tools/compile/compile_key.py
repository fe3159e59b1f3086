"""Compiler, flags and settings that decide the keys of a run's graphs, as far as known outside the compiler."""

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
"""Flags for the cache around the compiler, which no key depends on.

Source: AWS Neuron documentation, "Neuron Persistent Cache", and the help of `neuron_parallel_compile`.
"""

VARIABLES = ("NEURON_FUSE_SOFTMAX", "NEURON_CUSTOM_SILU", "XLA_DISABLE_FUNCTIONALIZATION")
"""Environment variables under which torch-neuronx lowers the same step to other graphs."""

NATIVE_VARIABLES = ("NEURON_COMPILER_OPT_LEVEL", "NEURON_LOGICAL_NC_CONFIG")
"""Environment variables that are part of the keys of TorchNeuron's graphs."""

COMPILERS = ("neuronx-cc", "nki")
"""Packages that compile TorchNeuron's graphs."""

PACKAGES = ("nxtrain", "torch", "torch-xla", "torch-neuronx", "neuronx-distributed")
"""Packages whose version may change a graph while the settings stay equal."""

_FREE = ("run", "cluster", "checkpoint", "compile", "data", "metrics", "model", "recovery")
"""Sections that shape no graph; the model's shape stands for its section."""
_FREE_KEYS = {
    *("backend.name", "train.steps", "train.epochs", "train.eval_batches"),
    *(f"optim.{key}" for key in ScheduleConfig.model_fields),
}
_OPTIONAL = ("train.eval_every", "checkpoint.every", "recovery.vote_every")
"""Intervals: a graph depends on whether there is one, and not on its length."""


def build_of(plan: Resolved, world: int, environ: Mapping[str, str], compiler: str = "") -> Build:
    """Build of a run.

    Args:
        compiler: Folder of the compiler's version; empty if it is not known yet. TorchNeuron's files name no compiler,
            so that there the versions of the compilers are settings.
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
    """The compiler's own flags, in order; a value that follows its flag stays after it."""
    flags: list[str] = []
    of_cache = False
    for token in shlex.split(text):
        if token.startswith("-"):
            of_cache = token.partition("=")[0] in CACHE_FLAGS
        if not of_cache:
            flags.append(token)
    return tuple(flags)
