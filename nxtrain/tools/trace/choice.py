"""Choices that a run makes on its own device, and the values that replace them in a trace on a CPU."""

from __future__ import annotations

import os
from dataclasses import dataclass

from nxtrain.backends import choose_layers
from nxtrain.backends.attention_choice import AttentionChoice
from nxtrain.backends.neuron.hardware import INSTANCES
from nxtrain.backends.neuron.sdk import RECOMMENDED, RELEASES, Package, SdkVersion, detect, installed, unverified_notes
from nxtrain.common.machines import Machine
from nxtrain.config.schema import RunConfig
from nxtrain.launch.neuron import announced_attention, attention_of, machine_of

TRACED = {"backend.name": "xla", "backend.layers": "native", "backend.attention": "plain"}
"""Choices that can be traced on any machine, by key."""

ASSUMED = INSTANCES["trn1.32xlarge"]
"""Machine of a run that names none, traced on a host that is not a machine of the table."""

_NXD = "neuronx-distributed"


@dataclass(frozen=True)
class StandIn:
    """Value that is traced in place of the one that a run uses.

    Args:
        key: Dotted key of the configuration.
        reason: Reason for another value in `TRACED`, in words.
    """

    key: str
    configured: str
    run: str
    reason: str

    def __str__(self) -> str:
        """Text of the note for the user."""
        reason = self.reason
        if self.configured == "auto":
            reason = f"auto: {reason}"
        return f"traced with {self.key}={TRACED[self.key]} in place of {self.run} ({reason})"


@dataclass(frozen=True)
class Choices:
    """Choices of a run that are traced, and notes on them for the user.

    Args:
        layers: `native` or `nxd`.
    """

    layers: str
    instance: Machine
    stand_ins: tuple[StandIn, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Machine:
    """Machine of a run; packages that are missing here are assumed to be installed there.

    Args:
        distributed: NeuronX Distributed: the installed package, or the one that belongs to the SDK.
        lacking: Reason why NeuronX Distributed is missing here; empty if it is installed.
    """

    instance: Machine
    sdk: SdkVersion
    distributed: Package
    lacking: str


def backend_of(config: RunConfig) -> str:
    """Backend of a run; `auto` means `neuron`, since graphs are traced for the compiler of Trainium."""
    if config.backend.name == "auto":
        return "neuron"
    return config.backend.name


def choose(config: RunConfig) -> Choices:
    """Make the choices of a run's ranks on their machine, with the functions that the ranks call.

    Raises:
        BackendError: The run refuses its layers.
        ConfigError: The run refuses its attention.
    """
    name = backend_of(config)
    stand_ins, notes = _device(config, name), list[str]()
    if name != "neuron":
        if config.backend.layers == "nxd":
            stand_ins.append(StandIn("backend.layers", "nxd", "nxd", f"on {name} for tests alone"))
        attention = announced_attention(config, name, os.environ)
        if attention is not None and attention.kind not in ("flash", "plain"):
            _note_attention(attention, config.backend.attention, name, stand_ins, notes)
        return Choices("native", ASSUMED, tuple(stand_ins), tuple(notes))
    instance = machine_of(config)
    if instance is None:
        instance = ASSUMED
        notes.append(f"{ASSUMED.name} is assumed; cluster.instance names the instance of a run")
    machine = _machine(instance)
    layers = _layers(config, machine, stand_ins, notes)
    is_flash = _attention(config, machine, stand_ins, notes)
    if not machine.lacking and (layers == "nxd" or is_flash):
        notes += unverified_notes()
    return Choices(layers, machine.instance, tuple(stand_ins), tuple(notes))


def without_nxd(choices: Choices, config: RunConfig, why: str) -> Choices:
    """The choices of a machine on which NeuronX Distributed is installed and cannot be loaded."""
    stand_in = StandIn("backend.layers", config.backend.layers, "nxd", why)
    notes = tuple(note for note in choices.notes if note != _nxd_is_traced())
    return Choices("native", choices.instance, (*choices.stand_ins, stand_in), notes)


def _machine(instance: Machine) -> _Machine:
    sdk, package = detect() or RECOMMENDED, installed(_NXD)
    if package is None or package.placeholder:
        lacking = "is not here"
        if package is not None:
            lacking = "is PyPI's empty placeholder here"
        return _Machine(instance, sdk, Package(_NXD, RELEASES[sdk].neuronx_distributed), lacking)
    return _Machine(instance, sdk, package, "")


def _device(config: RunConfig, name: str) -> list[StandIn]:
    configured = config.backend.name
    if configured == "xla":
        return []
    reason = "graphs are those of PyTorch/XLA"
    if name == "neuron":
        reason = "its device is not here, and graphs need none"
    if configured == "auto":
        reason = f"neuron on a Trainium instance; {reason}"
    if name == "neuron" and config.precision.update == "bf16_stochastic":
        reason += "; elementary operations stand for the hardware's rounding"
    return [StandIn("backend.name", configured, name, reason)]


def _layers(config: RunConfig, machine: _Machine, stand_ins: list[StandIn], notes: list[str]) -> str:
    chosen, distributed = config.backend, machine.distributed
    may, adapted = chosen.allow_unverified, config.finetune.adapts
    layers, why = choose_layers(chosen.layers, "neuron", allow_unverified=may, assumed=distributed, adapted=adapted)
    if layers == "native":
        if chosen.layers == "auto":
            notes.append(f"backend.layers=auto is native on neuron: {why}")
        return "native"
    if machine.lacking:
        reason = f"nxd on neuron where {_NXD} is installed; it {machine.lacking}"
        stand_ins.append(StandIn("backend.layers", chosen.layers, "nxd", reason))
        return "native"
    notes.append(_nxd_is_traced())
    return "nxd"


def _nxd_is_traced() -> str:
    package = installed(_NXD)
    return f"traced with the layers and the order of ranks of {_NXD} {package.version if package else ''}"


def _attention(config: RunConfig, machine: _Machine, stand_ins: list[StandIn], notes: list[str]) -> bool:
    """True for a run with the flash kernel."""
    configured, instance = config.backend.attention, machine.instance
    attention = attention_of(config, instance, machine.sdk, machine.distributed)
    if attention is None:
        return False
    _note_attention(attention, configured, instance.name, stand_ins, notes)
    return attention.is_flash


def _note_attention(
    attention: AttentionChoice, configured: str, where: str, stand_ins: list[StandIn], notes: list[str]
) -> None:
    if attention.is_flash:
        reason = f"flash on {where}, by {attention.reason}; NKI kernels are traced by AWS's compiler alone"
        stand_ins.append(StandIn("backend.attention", configured, "flash", reason))
    elif configured == "auto":
        notes.append(f"backend.attention=auto is {attention.kind} on {where}: {attention.reason}")
