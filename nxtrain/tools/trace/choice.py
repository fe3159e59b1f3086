"""Automatic choices of a run that depend on its device, and their replacements when it is traced on a CPU."""

from __future__ import annotations

import os
from dataclasses import dataclass

from nxtrain.backends import choose_layers
from nxtrain.backends.attention_choice import AttentionChoice
from nxtrain.backends.neuron.hardware import INSTANCES
from nxtrain.backends.neuron.sdk import RECOMMENDED, RELEASES, Package, detect, installed, unverified_notes
from nxtrain.common.machines import Machine
from nxtrain.config.schema import ON_GPUS, RunConfig
from nxtrain.launch.neuron import announced_attention, attention_of, experts_of, machine_of

TRACED = {
    "backend.name": "xla",
    "backend.layers": "native",
    "backend.attention": "plain",
    "backend.experts": "plain",
    "backend.rounding": "software",
}
"""Configuration values that can be traced on any machine, by key."""

ASSUMED = INSTANCES["trn1.32xlarge"]
"""Instance type assumed for a run that names none, if this host is not a known instance either."""

NXD = "neuronx-distributed"

BY_COMPILER = "only AWS's compiler can trace NKI kernels"


@dataclass(frozen=True)
class TracedReplacement:
    """Configuration value that is traced in place of the value that a run uses."""

    key: str  # dotted key of the configuration
    configured: str
    run: str
    reason: str  # reason why another value is traced, as text

    def __str__(self) -> str:
        """Text for the user: the value traced in place of the run's value, and the reason."""
        reason = self.reason
        if self.configured == "auto":
            reason = f"auto: {reason}"
        return f"traced with {self.key}={TRACED[self.key]} in place of {self.run} ({reason})"


@dataclass(frozen=True)
class Choices:
    """Resolved layer set and machine of a traced run, with notes for the user."""

    layers: str  # `native` or `nxd`
    instance: Machine
    stand_ins: tuple[TracedReplacement, ...]
    notes: tuple[str, ...] = ()


def backend_of(config: RunConfig) -> str:
    """Backend of a run; `auto` means `neuron`, since graphs are traced for Trainium's compiler."""
    if config.backend.name == "auto":
        return "neuron"
    return config.backend.name


def choose(config: RunConfig) -> Choices:
    """Resolve the automatic choices of a run as its ranks would on their machine.

    Raises:
        BackendError: The layer set of the configuration cannot run.
        ConfigError: The attention of the configuration cannot run.
    """
    name, chosen = backend_of(config), config.backend
    stand_ins = _stand_ins_of_device(config, name)
    notes: list[str] = []

    layers = "native"
    lacking = ""
    instance = ASSUMED
    where = name
    attention: AttentionChoice | None = None
    if name != "neuron":
        if chosen.layers == "nxd":
            stand_ins.append(TracedReplacement("backend.layers", "nxd", "nxd", f"on {name} only for tests"))
        attention = announced_attention(config, name, os.environ)
        if name == ON_GPUS and attention is not None and chosen.attention not in ("auto", "plain"):
            reason = f"{attention.reason}; elementary operations are traced"
            stand_ins.append(TracedReplacement("backend.attention", chosen.attention, attention.kind, reason))
        if attention is not None and attention.kind in ("flash", "plain"):
            if (name, attention.kind, chosen.attention) == (ON_GPUS, "flash", "auto"):
                notes.append(f"backend.attention=auto is {attention.kind} on {where}: {attention.reason}")
            attention = None
    else:
        named = machine_of(config)
        if named is None:
            notes.append(f"{ASSUMED.name} is assumed; cluster.instance names the instance of a run")
        instance = named or ASSUMED
        where = instance.name
        # Packages that are missing here are assumed to be installed on the run's machine, in the version of the SDK.
        sdk, distributed = detect() or RECOMMENDED, installed(NXD)
        if distributed is None or distributed.placeholder:
            lacking = "is not here"
            if distributed is not None:
                lacking = "is PyPI's empty placeholder here"
            distributed = Package(NXD, RELEASES[sdk].neuronx_distributed)
        layers = _layers(config, distributed, lacking, stand_ins, notes)
        attention = attention_of(config, instance, sdk, distributed)
        experts = experts_of(config, instance, sdk)
        if experts is not None and experts.kind == "blockwise":
            reason = f"{experts.reason}, on {where}; {BY_COMPILER}"
            stand_ins.append(TracedReplacement("backend.experts", chosen.experts, experts.kind, reason))
        elif experts is not None and chosen.experts == "auto":
            notes.append(f"backend.experts=auto is {experts.kind} on {where}: {experts.reason}")

    if attention is not None and (attention.is_flash or attention.kind == "bounded"):
        reason = f"{attention.kind} on {where}, by {attention.reason}; {BY_COMPILER}"
        stand_ins.append(TracedReplacement("backend.attention", chosen.attention, attention.kind, reason))
    elif attention is not None and chosen.attention == "auto":
        notes.append(f"backend.attention=auto is {attention.kind} on {where}: {attention.reason}")
    uses_nxd = layers == "nxd" or (attention is not None and attention.is_flash)
    if name == "neuron" and uses_nxd and not lacking:
        notes += unverified_notes()
    return Choices(layers, instance, tuple(stand_ins), tuple(notes))


def without_nxd(choices: Choices, config: RunConfig, why: str) -> Choices:
    """Replace the layer set `nxd` by `native`, for a machine on which NeuronX Distributed cannot be loaded.

    Args:
        why: Reason for the replacement.
    """
    stand_in = TracedReplacement("backend.layers", config.backend.layers, "nxd", why)
    notes = tuple(note for note in choices.notes if note != _nxd_is_traced())
    return Choices("native", choices.instance, (*choices.stand_ins, stand_in), notes)


def _stand_ins_of_device(config: RunConfig, name: str) -> list[TracedReplacement]:
    """Replacements of the device and of its stochastic rounding."""
    stand_ins: list[TracedReplacement] = []
    of_rounding = "elementary operations stand for the hardware's rounding"
    is_stochastic = config.precision.update == "bf16_stochastic"
    if config.backend.name != "xla":
        reason = "graphs are those of PyTorch/XLA"
        if name == "neuron":
            reason = "its device is not here, and graphs need none"
        if config.backend.name == "auto":
            reason = f"neuron on a Trainium instance; {reason}"
        if name == "neuron" and is_stochastic and config.backend.rounding == "auto":
            reason += f"; {of_rounding}"
        stand_ins.append(TracedReplacement("backend.name", config.backend.name, name, reason))
    if config.backend.rounding == "hardware" and is_stochastic:
        stand_ins.append(TracedReplacement("backend.rounding", "hardware", "hardware", of_rounding))
    return stand_ins


def _layers(
    config: RunConfig, distributed: Package, lacking: str, stand_ins: list[TracedReplacement], notes: list[str]
) -> str:
    """Layer set that is traced, `native` or `nxd`.

    Args:
        lacking: Reason why NeuronX Distributed is missing here; empty if it is installed.
    """
    chosen = config.backend
    may, own = chosen.allow_unverified, config.needs_own_layers
    layers, why = choose_layers(chosen.layers, "neuron", allow_unverified=may, assumed=distributed, needs_own=own)
    if layers == "native":
        if chosen.layers == "auto":
            notes.append(f"backend.layers=auto is native on neuron: {why}")
        return "native"
    if lacking:
        reason = f"nxd on neuron where {NXD} is installed; it {lacking}"
        stand_ins.append(TracedReplacement("backend.layers", chosen.layers, "nxd", reason))
        return "native"
    notes.append(_nxd_is_traced())
    return "nxd"


def _nxd_is_traced() -> str:
    package = installed(NXD)
    return f"traced with the layers and the order of ranks of {NXD} {package.version if package else ''}"
