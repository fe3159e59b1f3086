"""Environment variables and compiler flags of a run, each with its reason, merged with those of the shell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from nxtrain.backends.neuron.sdk import SdkVersion
from nxtrain.backends.xla.environment import ORIGIN, refused_variables
from nxtrain.common.errors import ConfigError, Problem

COMPILER_FLAGS = "NEURON_CC_FLAGS"
CACHE = "NEURON_COMPILE_CACHE_URL"
NATIVE_CACHE = "TORCH_NEURONX_NEFF_CACHE_DIR"

_LEVEL = re.compile("-O([0-9])")
_SAME_NAME = {"-O": "--optlevel", "-lnc": "--logical-nc-config", "--lnc": "--logical-nc-config"}


@dataclass(frozen=True)
class Variable:
    """Environment variable of a run, or flag of the Neuron compiler.

    Args:
        name: Name of the variable or flag.
        value: Value; empty for a flag without a value.
        reason: Reason why the run sets the variable.
        source: Documentation of the variable.
        instead: Hint for another value. If the shell has another value, the run is refused with this hint; if the hint
            is empty, the shell's value is used.
    """

    name: str
    value: str
    reason: str
    source: str = ""
    instead: str = ""

    @property
    def flag(self) -> str:
        """Flag with its value, in the compiler's format."""
        if not self.value:
            return self.name
        return f"{self.name}={self.value}"


@dataclass(frozen=True)
class Environment:
    """Environment variables and compiler flags of a run on Neuron devices.

    Args:
        sdk: Release of the Neuron SDK.
        variables: Environment variables without the compiler flags.
        compiler_flags: Flags of the compiler and of its cache.
        barred: Variables and flags with forbidden values; `instead` is the hint.
        xla: True for PyTorch/XLA, where some variables are refused.
        passed: Flags that TorchNeuron or another variable passes to the compiler; the shell must not repeat them.
        notes: Notes for the user, such as variables that are left out.
    """

    sdk: SdkVersion
    variables: tuple[Variable, ...]
    compiler_flags: tuple[Variable, ...]
    forbidden: tuple[Variable, ...] = ()
    xla: bool = True
    passed: tuple[Variable, ...] = ()
    notes: tuple[str, ...] = ()

    def conflicts(self, environ: Mapping[str, str]) -> list[Problem]:
        """Return a problem, with a hint, for each setting of the shell that contradicts the run."""
        problems: list[Problem] = []
        if self.xla:
            problems += refused_variables(environ, self.sdk)
        dead = {problem.key for problem in problems}
        for ours in self.variables:
            theirs = environ.get(ours.name, ours.value)
            if ours.instead and theirs != ours.value and ours.name not in dead:
                problems.append(Problem(ours.name, f"{theirs}, but this run needs {ours.value}", ORIGIN, ours.instead))
        for bar in self.forbidden:
            if environ.get(bar.name) == bar.value:
                problems.append(Problem(bar.name, f"{bar.value} {bar.reason}", ORIGIN, bar.instead))
        flags = {_canonical(flag.name): flag for flag in self.compiler_flags}
        bars = {(bar.name, bar.value): bar for bar in self.forbidden}
        passed = {flag.name: flag for flag in self.passed}
        (cache,) = (variable.value for variable in self.variables if variable.name in {CACHE, NATIVE_CACHE})
        for name, value, text in _parse(environ.get(COMPILER_FLAGS, "")):
            if name == "--cache-dir" and value != cache:
                reason = f"{text} would win over compile.cache_dir={cache}"
                problems.append(Problem(COMPILER_FLAGS, reason, ORIGIN, f"use compile.cache_dir={value} instead"))
            elif (name, value) in bars:
                bar = bars[name, value]
                problems.append(Problem(COMPILER_FLAGS, f"{text} {bar.reason}", ORIGIN, bar.instead))
            elif name in passed:
                problems.append(Problem(COMPILER_FLAGS, f"{text} {passed[name].reason}", ORIGIN, passed[name].instead))
            elif name in flags and value != flags[name].value:
                reason = f"{text}, but this run needs {flags[name].flag}"
                problems.append(Problem(COMPILER_FLAGS, reason, ORIGIN, flags[name].instead or "leave it out"))
        return problems

    def with_shell_values(self, environ: Mapping[str, str]) -> tuple[Variable, ...]:
        """Environment variables of a child process; where the run allows other values, the shell's value.

        The shell must have no conflicts.
        """
        chosen = with_shell_values(self.variables, environ)
        if not self.xla:
            return chosen
        ours = {_canonical(flag.name) for flag in self.compiler_flags}
        added = [text for name, _, text in _parse(environ.get(COMPILER_FLAGS, "")) if name not in ours]
        merged = " ".join([*(flag.flag for flag in self.compiler_flags), *added])
        reasons = "\n".join(f"{flag.flag}: {flag.reason} [{flag.source}]" for flag in self.compiler_flags)
        return (*chosen, Variable(COMPILER_FLAGS, merged, reasons))


QUIET_PROFILER = Variable(
    "KINETO_LOG_LEVEL",
    "6",
    "torch's profiler prints without a GPU, as an error, that it finds none; 6 is above all its lines",
    "torch 2.9 and 2.15, third_party/kineto/libkineto/src/DeviceProperties.cpp and init.cpp",
)


CUBLAS_WORKSPACE = Variable(
    "CUBLAS_WORKSPACE_CONFIG",
    ":4096:8",
    "cuBLAS repeats its bits with workspaces of fixed sizes, as backend.deterministic=true asks",
    "https://docs.nvidia.com/cuda/cublas/#results-reproducibility",
)


def with_shell_values(variables: Iterable[Variable], environ: Mapping[str, str]) -> tuple[Variable, ...]:
    """Environment variables of a child process, with the shell's value for variables that the shell has set."""
    chosen = []
    for variable in variables:
        theirs = environ.get(variable.name, variable.value)
        if theirs != variable.value:
            variable = replace(variable, value=theirs, reason="as the shell has it", source="")  # noqa: PLW2901
        chosen.append(variable)
    return tuple(chosen)


def _parse(flags: str) -> list[tuple[str, str, str]]:
    """Parse compiler flags; return the canonical name, the value and the original text of each flag."""
    try:
        tokens = shlex.split(flags)
    except ValueError as error:
        raise ConfigError(
            [Problem(COMPILER_FLAGS, f"{flags} cannot be split like a shell command: {error}", ORIGIN)]
        ) from error
    parsed: list[tuple[str, str, str]] = []
    for token in tokens:
        if token.startswith("-") or not parsed or parsed[-1][1]:
            name, _, value = token.partition("=")
            level = _LEVEL.fullmatch(name)
            if level is not None:
                name, value = "--optlevel", level[1]
            parsed.append((_canonical(name), value, shlex.quote(token)))
        else:
            name, _, text = parsed.pop()
            parsed.append((name, token, f"{text} {shlex.quote(token)}"))
    return parsed


def _canonical(name: str) -> str:
    return _SAME_NAME.get(name, name.replace("_", "-"))
