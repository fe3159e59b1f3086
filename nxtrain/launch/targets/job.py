"""Resolved run from which job files of all clusters are rendered: machines, command, image and configuration."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

from nxtrain.common.errors import ConfigError, Problem
from nxtrain.common.io.paths import is_bucket
from nxtrain.common.machines import GPU, INSTANCE_TYPES, NEURON, Machine
from nxtrain.config.bounds import quoted
from nxtrain.config.check import resolve_config
from nxtrain.config.decode import nearest
from nxtrain.config.load import Loaded, load, values
from nxtrain.config.model_folder import KEY
from nxtrain.config.schema import RunConfig
from nxtrain.config.show import dump_table
from nxtrain.config.tables import merge, nest
from nxtrain.launch.local import PORT, check_elastic, check_nodes, ranks_per_node
from nxtrain.launch.neuron import check_machine
from nxtrain.launch.targets.storage import STORAGE_GIB, check_storage

CONFIG_FILE = "run.toml"
"""Name of the configuration file in containers, which has the values of the file and of the overrides."""

MAX_NAME = 40
"""Most characters of a run's name, so that names of its pods fit the 63 characters of a DNS label."""

SHARED = "/fsx"
"""Mount point of the shared file system in containers, to which relative paths of a configuration refer."""


_LABEL = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"

_NO_CLAIM = "--claim is empty, but the pods of a run need the volume of a shared file system"


@dataclass(frozen=True)
class LaunchOptions:
    """Options of a launch that are not in the configuration.

    Args:
        nproc: Ranks per machine; None for all devices of the instance, or the number that the degrees require.
        image: Container image; empty for `nxtrain-LANE` of the rendered Dockerfile, and for no container under Slurm.
        claim: Kubernetes volume claim of the shared file system.
        min_nodes: Smallest number of machines to which the run may shrink; 0 for all machines.
        mounts: Mounted folders of Slurm's containers, in Pyxis' format: `SRC:DST[,SRC:DST...]`.
        storage_gib: Size of a new cluster's shared file system in GiB.
    """

    nproc: int | None = None
    image: str = ""
    claim: str = "fsx-claim"
    min_nodes: int = 0
    mounts: str = ""
    storage_gib: int = STORAGE_GIB


@dataclass(frozen=True)
class ClusterJob:
    """Resolved run with its machines and its launch options.

    Args:
        path: Configuration file.
        overrides: Values that win over the file's.
        loaded: Loaded configuration.
        machine: Instance type of the machines.
        nproc: Ranks per machine.
        lane: Kind of device that the image supports: neuron, neuron-native, gpu, xla or cpu.
        options: Launch options.
    """

    path: Path
    overrides: tuple[str, ...]
    loaded: Loaded
    machine: Machine
    nproc: int
    lane: str
    options: LaunchOptions

    @property
    def config(self) -> RunConfig:
        """Configuration of the run."""
        return self.loaded.config

    @property
    def nodes(self) -> int:
        """Number of machines of the run."""
        return self.config.cluster.nodes

    @property
    def image(self) -> str:
        """Name of the container image."""
        return self.options.image or f"nxtrain-{self.lane}"

    @property
    def min_nodes(self) -> int:
        """Smallest number of machines to which the run may shrink; equal to `nodes` if it may not shrink."""
        return self.options.min_nodes or self.nodes

    @property
    def is_elastic(self) -> bool:
        """True if the run may continue with fewer machines."""
        return self.min_nodes < self.nodes

    @property
    def name(self) -> str:
        """Name of the run as a DNS label, which Kubernetes, SageMaker and Slurm require.

        The label has `-` for `_`. If it differs from the name in anything else, it gets a hash as suffix. So objects of
        runs with similar names, such as `x=1` and `x-1`, do not replace each other.
        """
        name = self.config.run.name
        label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        if not label[:1].isalpha():
            label = f"run-{label}".strip("-")
        if label == name.replace("_", "-") and len(label) <= MAX_NAME:
            return label
        suffix = hashlib.sha256(name.encode()).hexdigest()[:6]
        return f"{label[: MAX_NAME - 7].strip('-')}-{suffix}"

    @property
    def steps(self) -> tuple[str, ...]:
        """Subcommands of nxtrain to run in order; on Trainium, `compile` precedes `launch`."""
        if self.lane == "neuron":
            return "compile", "launch"
        return ("launch",)

    @property
    def config_text(self) -> str:
        """Content of the configuration file, without default values."""
        given = [
            nest(key, value) for key, value in values(self.config).items() if self.loaded.origins[key] != "default"
        ]
        empty: dict[str, Any] = {}
        return dump_table(reduce(merge, given, empty))

    def arguments(self, config_file: str, first_node: str) -> tuple[str, ...]:
        """Arguments of `nxtrain compile` and `nxtrain launch` in a container.

        Args:
            config_file: Path of `CONFIG_FILE` in the container.
            first_node: Name of the node with the rendezvous.
        """
        arguments = [config_file, f"--nproc={self.nproc}"]
        if self.nodes > 1:
            arguments.append(f"--first-node={first_node}:{PORT}")
        if self.is_elastic:
            arguments.append(f"--min-nodes={self.min_nodes}")
        return tuple(arguments)


def resolve_job(path: Path, overrides: Sequence[str], options: LaunchOptions) -> ClusterJob:
    """Resolve a run for the rendering of job files.

    Raises:
        ConfigError: The configuration, the instance or the number of ranks is invalid; the error has all problems.
    """
    loaded = load(path, overrides)
    config = loaded.config
    problems: list[Problem] = []
    machine = INSTANCE_TYPES.get(config.cluster.instance) or Machine(config.cluster.instance)
    lane, wanted = _lane(config, machine)
    problems += _check_instance(config, machine, lane, wanted)
    if machine.resource == NEURON:
        problems += check_machine(config, machine, native=lane == "neuron-native")
    if machine.devices and not config.parallel.dp:
        uneven: list[Problem] = []
        nproc = options.nproc or machine.devices
    else:
        uneven = check_nodes(loaded, options.nproc)
        nproc = options.nproc or ranks_per_node(config, None)
    problems += uneven
    if machine.devices and nproc > machine.devices and not uneven:
        reason = f"{nproc} ranks per machine, but {machine.name} has {machine.devices} cores or GPUs for them"
        problems.append(Problem("cluster.nodes", reason, hint="use more cluster.nodes, or lower degrees"))
    if not options.claim:
        problems.append(Problem("", _NO_CLAIM, hint="name it, or leave --claim out"))
    problems += _check_mounts(options)
    problems += check_storage(options.storage_gib)
    problems += check_elastic(config, options.min_nodes)
    if options.min_nodes and lane == "neuron":
        reason = "--min-nodes: graphs for Trainium are compiled for one number of ranks"
        problems.append(
            Problem("", reason, hint="leave it out, and use checkpoint.resume=auto with other cluster.nodes")
        )
    for nodes in {config.cluster.nodes, options.min_nodes or config.cluster.nodes}:
        world: int | None = nproc * nodes
        if uneven:
            world = None
        try:
            config = resolve_config(loaded, world).config
        except ConfigError as error:
            problems += [problem for problem in error.problems if problem not in problems]
    if problems:
        raise ConfigError([replace(p, origin=p.origin or loaded.origins.get(p.key, "")) for p in problems])
    if config.model.hf != loaded.config.model.hf:
        overrides = [*overrides, f"{KEY}={config.model.hf}"]  # one commit for all machines
    return ClusterJob(path, tuple(overrides), loaded, machine, nproc, lane, options)


def lost_run_folder(job: ClusterJob, root: str | Path, kept: Sequence[str | Path]) -> str:
    """Reason why the checkpoints of a run are lost with its containers; empty if they are kept.

    Args:
        job: Resolved run.
        root: Working directory of the containers.
        kept: Folders of the containers that outlive them.
    """

    def is_kept(path: str | Path) -> bool:
        place = Path(os.path.normpath(Path(root, path)))  # `..` may lead out of a folder
        return any(place.is_relative_to(folder) for folder in kept)

    folder, mirror = job.config.run.dir, job.config.checkpoint.mirror
    if is_kept(folder) or is_bucket(mirror) or (mirror and is_kept(mirror)):
        return ""
    reason = f"{folder} is on the disk of a container, and its checkpoints are lost with the container"
    if mirror:
        reason += f"; so are those of checkpoint.mirror={mirror}"
    return reason


def check_run_folder(job: ClusterJob, root: str | Path, kept: Sequence[str | Path], way_out: str) -> None:
    """Refuse a run whose checkpoints are lost with its containers.

    Args:
        job: Resolved run.
        root, kept: As in `lost_run_folder`.
        way_out: Advice for the user.

    Raises:
        ConfigError: The checkpoints are lost.
    """
    reason = lost_run_folder(job, root, kept)
    if reason:
        raise ConfigError([Problem("run.dir", reason, job.loaded.origins["run.dir"], way_out)])


def _lane(config: RunConfig, machine: Machine) -> tuple[str, str]:
    """Return the kind of device, and its Kubernetes resource, of the backend; with `auto`, of the instance."""
    name, no_gpu = config.backend.name, {"neuron": NEURON, "neuron-native": NEURON, "xla": "", "cpu": ""}
    if name == "auto":
        return {NEURON: "neuron", GPU: "gpu"}.get(machine.resource, "cpu"), machine.resource
    if name in no_gpu:
        return name, no_gpu[name]
    return "gpu", GPU


def _check_mounts(options: LaunchOptions) -> Iterator[Problem]:
    mounts = options.mounts
    if mounts and not options.image:
        yield Problem("", "--mounts has no effect without a container", hint="name its image with --image")
    if not mounts:
        return
    for mount in mounts.split(","):
        if not re.fullmatch(r"[^:\s]+:/[^:\s]*(:[a-z+]+)?", mount):
            yield Problem("", f"--mounts {quoted(mount)} is not SRC:DST or SRC:DST:FLAGS", hint="write /fsx:/fsx")


def _check_instance(config: RunConfig, machine: Machine, lane: str, wanted: str) -> Iterator[Problem]:
    instance = config.cluster.instance
    if machine.resource != wanted:
        yield _misfit(instance, lane, wanted)
    elif instance and instance not in INSTANCE_TYPES and config.backend.name == "auto":
        reason = f"{quoted(instance)} is not an instance that nxtrain knows, but backend.name=auto needs its devices"
        hint = f"{nearest(instance, list(INSTANCE_TYPES))}; for another machine, set backend.name"
        yield Problem("cluster.instance", reason, hint=hint)
    elif instance and not re.fullmatch(_LABEL, instance):
        reason = f"{quoted(instance)} is not a label: up to 63 of A-Z, a-z, 0-9, '.', '_' and '-'"
        yield Problem("cluster.instance", reason, hint="use the name of the type, such as m5.xlarge")


def _misfit(instance: str, lane: str, wanted: str) -> Problem:
    fitting = [name for name, machine in INSTANCE_TYPES.items() if machine.resource == wanted]
    if not instance:
        reason = "not set, but the cluster's machines differ from this machine"
        return Problem("cluster.instance", reason, hint=f"set it to one of {', '.join(fitting)}")
    if instance in INSTANCE_TYPES:
        reason = f"{instance} has no devices for backend.name={lane}"
        return Problem("cluster.instance", reason, hint=f"use one of {', '.join(fitting) or 'the other machines'}")
    reason = f"{quoted(instance)} is not an instance that nxtrain knows"
    return Problem("cluster.instance", reason, hint=nearest(instance, fitting))
