"""Folder of this node's compiled graphs: fills in `{host}`, and refuses network file systems.

All ranks look up graphs at once, under file locks. On network file systems, file locks are slow or fail. AWS's guide
reports missing keys, missing files and corrupt entries, and recommends a folder per host.

Source: AWS Neuron documentation, "PyTorch Neuron training troubleshooting guide", on the cache and NFS.
"""

from __future__ import annotations

import getpass
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from nxtrain.common.errors import ConfigError, Problem
from nxtrain.common.io.paths import BUCKET_SCHEMES, scheme_of

if TYPE_CHECKING:  # data workers need only the names of folders, and the schema is half of their start
    from nxtrain.config.operation_schema import CompileConfig

MOUNTS = Path("/proc/self/mountinfo")
NETWORK_TYPES = {
    *("nfs", "nfs4", "lustre", "cifs", "smb3", "ceph", "glusterfs", "beegfs", "gpfs", "wekafs", "afs", "9p"),
    *("fuse.s3fs", "fuse.goofys", "fuse.mount-s3", "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.ceph-fuse"),
}
"""Type names of network file systems. EFS mounts as nfs4, FSx for Lustre as lustre."""

LOCKS = "locks"
"""Name of the folder inside a cache for the locks of TorchNeuron's compilations."""

LOCAL_LOCKS = Path("/var/tmp/nxtrain-locks")
"""Prefix of a user's local folder for locks, used if the cache is on a network file system."""

_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")


def host_name() -> str:
    """Name of this machine, without its domain."""
    return socket.gethostname().split(".")[0]


def cache_folder(
    config: CompileConfig, *, host: str | None = None, mounts: str | None = None, shared: bool = False
) -> Path:
    """Absolute path of the folder of this node's compiled graphs; the folder need not exist.

    Args:
        config: The section `[compile]`.
        shared: The compiler writes files atomically and keeps its locks elsewhere, so that nodes may share a network
            folder.
        host: Value of `{host}`; by default the name of this machine.
        mounts: Text of `/proc/self/mountinfo`; by default that of this machine, if it has one.

    Raises:
        ConfigError: `cache_dir` is a bucket, has an unknown placeholder, or lies on a network file system.
    """
    name = "compile.cache_dir"
    text = str(config.cache_dir)
    if scheme_of(text) in BUCKET_SCHEMES:
        hint = "use a local folder, and fill it beforehand: nxtrain cache sync s3://BUCKET/PREFIX FOLDER"
        raise ConfigError([Problem(name, f"{text} is a bucket, and the compiler needs a disk of this node", hint=hint)])
    folder = Path(fill(name, text, {"host": host or host_name()})).expanduser().absolute()
    kind = network_type(folder, mounts)
    if kind and not shared and not config.allow_network:
        reason = f"{folder} is on a network file system ({kind}), where concurrent ranks lose and corrupt cache entries"
        hint = "use a local disk, such as /var/tmp/neuron-compile-cache, or force it with compile.allow_network=true"
        raise ConfigError([Problem(name, reason, hint=hint)])
    return folder


def lock_folder(cache: Path, mounts: str | None = None) -> Path:
    """Folder on a local disk for the locks of TorchNeuron's compilations.

    The folder is inside the cache, unless the cache is on a network file system.

    Args:
        cache: Folder of the compiled graphs.
        mounts: As for `cache_folder`.
    """
    local = LOCAL_LOCKS.with_name(f"{LOCAL_LOCKS.name}-{getpass.getuser()}")
    return local if network_type(cache, mounts) else cache / LOCKS


def fill(key: str, text: str, values: Mapping[str, str]) -> str:
    """Fill in the placeholders of a path, such as `{host}`.

    Args:
        key: Dotted configuration key of the path, for the message.
        text: Path with `{name}` for each value.
        values: Values by name.

    Raises:
        ConfigError: The path has a placeholder without a value.
    """
    unknown = [word for word in _PLACEHOLDER.findall(text) if word not in values]
    if unknown:
        words = ", ".join(f"{{{word}}}" for word in unknown)
        allowed = ", ".join(f"{{{word}}}" for word in values)
        raise ConfigError([Problem(key, f"{text!r} has {words}; only {allowed} is filled in", hint=f"write {allowed}")])
    return _PLACEHOLDER.sub(lambda match: values[match[1]], text)


def network_type(folder: Path, mounts: str | None = None) -> str:
    """Type of the network file system that contains a folder; empty for a local file system.

    Args:
        folder: The folder; need not exist.
        mounts: Text of `/proc/self/mountinfo`; by default that of this machine. A system without one counts as local.

    Source: proc_pid_mountinfo(5): field 5 is the mount point, the type follows a lone hyphen.
    """
    if mounts is None:
        mounts = MOUNTS.read_text(encoding="utf-8") if MOUNTS.exists() else ""
    folder = folder.resolve()
    best, kind = -1, ""
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        unescaped = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), left.split()[4])
        point = Path(unescaped)
        # A later mount at the same path hides an earlier one.
        if folder.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), right.split()[0]
    return kind if kind in NETWORK_TYPES else ""
