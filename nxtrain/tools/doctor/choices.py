"""Checks of a run's attention implementation and number types against the machine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from nxtrain.backends.capability import FLOAT8, bf16_warning, version
from nxtrain.common.errors import ConfigError
from nxtrain.common.machines import GPU, NEURON, Machine
from nxtrain.config.schema import ON_GPUS, RunConfig
from nxtrain.launch.neuron import announced_attention, is_native
from nxtrain.tools.doctor.finding import Finding, Host, ToolError, fault, passed


def check_choices(host: Host, config: RunConfig, machine: Machine | None) -> Iterator[Finding]:
    """Check attention, float8 and bfloat16 of a configuration against the machine's accelerators."""
    backend: str = config.backend.name
    gpus: dict[str, tuple[int, int]] = {}
    if backend in ("auto", ON_GPUS):
        gpus = _capabilities(host)
    if backend == "auto":
        resource = ""
        if machine is not None:
            resource = machine.resource
        if resource == NEURON and is_native(config):
            backend = "neuron-native"
        elif resource == NEURON:
            backend = "neuron"
        elif resource == GPU or gpus:
            backend = ON_GPUS
        else:
            backend = "cpu"
    yield from _attention(config, backend)
    recipe = config.precision.fp8
    if backend == ON_GPUS and recipe != "none":
        yield from _float8(recipe, gpus)
    if backend == ON_GPUS and config.precision.params == "bf16":
        for name, capability in gpus.items():
            warning = bf16_warning(name, capability)
            if warning:
                yield passed("bf16", warning)
                break


def _float8(recipe: str, gpus: Mapping[str, tuple[int, int]]) -> Iterator[Finding]:
    """Check that no GPU is too old for float8 matrix products.

    Other requirements of float8 are checked when a run starts.
    """
    needed = FLOAT8[recipe]
    old = [f"{name} has {version(capability)}" for name, capability in gpus.items() if capability < needed]
    if old:
        what = f"precision.fp8={recipe} needs compute capability {version(needed)}; {', '.join(old)}"
        fits = [other for other, least in FLOAT8.items() if min(gpus.values()) >= least]
        yield fault("float8", what, "no rank can start", f"use precision.fp8={' or '.join([*fits, 'none'])}")
    elif gpus:
        yield passed("float8", f"{recipe}: every GPU has compute capability {version(needed)} or more")


def _attention(config: RunConfig, backend: str) -> Iterator[Finding]:
    try:
        attention = announced_attention(config, backend, os.environ)
    except ConfigError as error:
        problem = error.problems[0]
        yield fault("attention", f"{problem.key}: {problem.reason}", "no rank can start", problem.hint)
    else:
        if attention is not None:
            yield passed("attention", str(attention))


def _capabilities(host: Host) -> dict[str, tuple[int, int]]:
    """Compute capability of each GPU model, by name; empty without GPUs or if the driver does not report it."""
    try:
        text = host.run("nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader")
    except ToolError:  # drivers before release 510 have no such field
        return {}
    capabilities = {}
    for line in (text or "").splitlines():
        name, _, capability = line.rpartition(",")
        major, _, minor = capability.strip().partition(".")
        if name and major.isdecimal() and minor.isdecimal():
            capabilities[name.strip()] = (int(major), int(minor))
    return capabilities
