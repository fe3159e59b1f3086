"""`nxtrain doctor`: all health checks of this machine.

The results are text or JSON, for Slurm's health check program and for a pod's probe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nxtrain.backends.neuron.hardware import PRODUCT_NAME, SYS
from nxtrain.common.errors import BackendError, ConfigError, StorageError
from nxtrain.common.machines import GPU, INSTANCE_TYPES, NEURON, Machine
from nxtrain.config.load import Loaded, load
from nxtrain.config.schema import ON_GPUS, RunConfig
from nxtrain.launch.local import PORT
from nxtrain.plan.command import Question, predict
from nxtrain.plan.predict import Assumptions
from nxtrain.tools.doctor.choices import check_choices
from nxtrain.tools.doctor.collectives import World, check_collectives
from nxtrain.tools.doctor.devices import check_devices
from nxtrain.tools.doctor.finding import Finding, Host, ToolError, fault
from nxtrain.tools.doctor.host import MIN_FREE_BYTES, check_cache, check_disk, check_host, check_instance, check_port
from nxtrain.tools.doctor.packages import check_packages

RESOURCES = {ON_GPUS: GPU, "neuron": NEURON, "neuron-native": NEURON}
"""Kubernetes resource names of the devices that a backend needs."""

EXIT_CODE = BackendError.exit_code  # exit code if a check found a fault


def examine(
    path: Path | None, overrides: Sequence[str], *, collectives: bool, world: World | None, host: Host | None = None
) -> Iterator[Finding]:
    """Run all checks of this machine, and yield each result as soon as its check ends.

    Args:
        path: Configuration of a run that is about to start here; None: the machine is checked for any run.
        overrides: Overrides of configuration keys.
        collectives: Check the links too, which starts processes that import torch.
        world: Machines that check their links together; None: this machine alone.
        host: Machine to check; None: this one.
    """
    loaded: Loaded | None = None
    config = RunConfig()
    if path is not None:
        loaded = load(path, overrides)
        config = loaded.config
    host = host or Host()
    name = host.read(str(SYS / PRODUCT_NAME))
    machine: Machine | None = None
    if config.backend.name not in {"cpu", "xla"}:
        machine = INSTANCE_TYPES.get(config.cluster.instance or name)
    if name not in INSTANCE_TYPES:
        name = ""
    backend = config.backend.name
    wanted = (backend, RESOURCES.get(backend, ""))
    yield check_instance(name, config.cluster.instance, machine)
    yield from _guarded("devices", lambda: check_devices(host, machine, needs_all=loaded is not None, wanted=wanted))
    yield from _guarded("host", lambda: check_host(host, machine))
    yield from _guarded("disk", lambda: [check_disk(config.run.dir, _needed_bytes(path, overrides, loaded))])
    if loaded is not None or (machine is not None and machine.resource == NEURON):
        yield from _guarded("cache", lambda: [check_cache(config.compile)])
    yield from _guarded("ports", lambda: [check_port(host, PORT, needs_all=loaded is not None)])
    yield from _guarded("packages", lambda: check_packages(machine))
    if loaded is not None:
        yield from check_choices(host, config, machine)
    if collectives:
        yield from _guarded("collectives", lambda: check_collectives(host, machine, world))


def _guarded(name: str, checks: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Yield the findings of a group of checks; a missing file or failing program becomes a finding."""
    try:
        yield from checks()
    except (OSError, ToolError) as error:
        yield fault(name, str(error), "the check could not be made", "see the message")


def _needed_bytes(path: Path | None, overrides: Sequence[str], loaded: Loaded | None) -> int:
    """Disk space in bytes that a run needs for its kept checkpoints and for one that is being written."""
    if path is None or loaded is None:
        return MIN_FREE_BYTES
    if not loaded.config.checkpoint.every:
        return 0
    try:
        prediction, _ = predict(path, overrides, Question(), Assumptions())
    except (ConfigError, StorageError):  # the machine is unknown, or the Hub does not answer
        return MIN_FREE_BYTES
    return prediction.checkpoint_bytes * (loaded.config.checkpoint.keep + 1)


def to_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Convert all findings to JSON types."""
    return {"ok": all(finding.ok for finding in findings), "findings": [asdict(finding) for finding in findings]}


def line_of(finding: Finding) -> str:
    """Format a finding as text, with cause and fix if it is a fault."""
    if finding.ok:
        return f"{'ok':6}{finding.name:12}{finding.what}"
    return f"{'FAULT':6}{finding.name:12}{finding.what}\n{'':18}why: {finding.why}\n{'':18}fix: {finding.fix}"
