"""Folder of this node's compiled graphs: `{host}` is filled in, and the folder must be on a local disk.

The compiler looks each graph up under file locks, from every rank at once. Network file systems answer such locks late
or never. AWS's guide names the results: missing keys, missing files and corrupt entries. Its remedy is a folder per
host.

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
"""Types of network file systems; EFS mounts as nfs4, FSx for Lustre as lustre."""

LOCKS = "locks"
"""Folder in a cache for locks of TorchNeuron's compilations."""

LOCAL_LOCKS = Path("/var/tmp/nxtrain-locks")
"""Beginning of a user's folder for locks, where the cache itself is on a network file system."""

_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")


def host_name() -> str:
    """Name of this machine, without its domain."""
    return socket.gethostname().split(".")[0]


def cache_folder(
    config: CompileConfig, *, host: str | None = None, mounts: str | None = None, shared: bool = False
) -> Path:
    """Absolute folder of this node's compiled graphs; need not exist.

    Args:
        config: The section `[compile]`.
        shared: The compiler's files are atomic and its locks are elsewhere, so that nodes may share a network's folder.
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
        reason = f"{folder} is on a network file system ({kind}), where many ranks at once lose and tear entries"
        hint = "use a local disk, such as /var/tmp/neuron-compile-cache, or force it with compile.allow_network=true"
        raise ConfigError([Problem(name, reason, hint=hint)])
    return folder


def lock_folder(cache: Path, mounts: str | None = None) -> Path:
    """Folder on a local disk for the locks of TorchNeuron's compilations: in the cache, unless a network has that.

    Args:
        cache: Folder of the compiled graphs.
        mounts: As for `cache_folder`.
    """
    local = LOCAL_LOCKS.with_name(f"{LOCAL_LOCKS.name}-{getpass.getuser()}")
    return local if network_type(cache, mounts) else cache / LOCKS


def fill(key: str, text: str, values: Mapping[str, str]) -> str:
    """Fill in the placeholders of a path.

    Args:
        key: Dotted configuration key of the path, for the message.
        text: Path with `{name}` for each value.
        values: Values by name.

    Raises:
        ConfigError: The path has a name without a value.
    """
    unknown = [word for word in _PLACEHOLDER.findall(text) if word not in values]
    if unknown:
        words = ", ".join(f"{{{word}}}" for word in unknown)
        allowed = ", ".join(f"{{{word}}}" for word in values)
        raise ConfigError([Problem(key, f"{text!r} has {words}; only {allowed} is filled in", hint=f"write {allowed}")])
    return _PLACEHOLDER.sub(lambda match: values[match[1]], text)


def network_type(folder: Path, mounts: str | None = None) -> str:
    """Type of a folder's network file system; empty if the file system is local.

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
        # A later mount on the same place covers an earlier one.
        if folder.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), right.split()[0]
    return kind if kind in NETWORK_TYPES else ""
