"""Storage of a cluster: permissions for a run's S3 buckets, and Kubernetes volumes.

Sources: https://github.com/kubernetes-sigs/aws-fsx-csi-driver and https://github.com/kubernetes-sigs/aws-efs-csi-driver
(examples), https://docs.aws.amazon.com/fsx/latest/LustreGuide/managing-storage-capacity.html (sizes),
https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_variables.html (`${*}`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nxtrain.common.errors import ConfigError, Problem
from nxtrain.config.bounds import quoted
from nxtrain.config.schema import RunConfig
from nxtrain.launch.targets.yaml_text import dump_yaml

Manifest = dict[str, Any]

DEPLOYMENT = "PERSISTENT_2"
THROUGHPUT_MB_S = 250
"""Throughput of FSx for Lustre in MB/s per TiB."""

STORAGE_GIB = 4800
"""Default size of the shared file system in GiB, without `--storage`."""

SMALLEST_GIB, STEP_GIB = 1200, 2400
"""Sizes in GiB that FSx for Lustre offers for `DEPLOYMENT`: the smallest size, or a multiple of the step."""

_BUCKET = r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"
_FILE_SYSTEM = "fs-00000000000000000"

_FSX_STATIC = """\
Volume of an FSx for Lustre that exists already, and the claim of the run; written by nxtrain launch --target eks.
Replace volumeHandle, dnsname and mountname by those of your file system:

    aws fsx describe-file-systems --query 'FileSystems[].[FileSystemId,DNSName,LustreConfiguration.MountName]'
    kubectl apply -f fsx-static.yaml
"""

_FSX_DYNAMIC = """\
Claim whose FSx for Lustre is created on demand, and kept when the claim is deleted.
Written by nxtrain launch --target eks. Replace subnet and security group by those of your nodes; the group passes
ports 988 and 1018 to 1023. docs/slurm_kubernetes.md has the commands that delete the file system.

    kubectl apply -f fsx-dynamic.yaml
"""

_EFS = """\
Claim on an EFS that exists already, for machines in several zones; slower than FSx for Lustre.
Written by nxtrain launch --target eks. Replace fileSystemId by that of your file system:

    aws efs describe-file-systems --query 'FileSystems[].FileSystemId'
    kubectl apply -f efs.yaml
"""


@dataclass(frozen=True)
class Location:
    """Objects in an S3 bucket that a run uses.

    Args:
        bucket: Name of the bucket.
        key: Key of an object or of a folder; empty for the whole bucket.
        is_written: The run also writes and deletes objects.
    """

    bucket: str
    key: str
    is_written: bool


def check_storage(size_gib: int) -> list[Problem]:
    """Return a problem if FSx for Lustre does not offer a size; empty if it does."""
    if size_gib == SMALLEST_GIB or size_gib % STEP_GIB == 0:
        return []
    larger = (size_gib // STEP_GIB + 1) * STEP_GIB
    reason = f"--storage {size_gib}: FSx for Lustre has {SMALLEST_GIB} GiB, or a multiple of {STEP_GIB}"
    return [Problem("", reason, hint=f"use --storage {larger}")]


def locations(config: RunConfig) -> list[Location]:
    """List the S3 objects and folders that a run reads or writes.

    Raises:
        ConfigError: A configured address has no valid bucket name.
    """
    read = {
        "data.path": [config.data.path],
        "data.mixture": list(config.data.mixture),
        "data.validation_path": [config.data.validation_path],
        "checkpoint.resume": [config.checkpoint.resume],
    }
    mirror = config.checkpoint.mirror
    named = [("checkpoint.mirror", mirror)]
    for key, addresses in read.items():
        named += [(key, address) for address in addresses]
    used: list[Location] = []
    for key, address in named:
        if not address.startswith("s3://"):
            continue
        bucket, _, prefix = address.removeprefix("s3://").partition("/")
        if not re.fullmatch(_BUCKET, bucket):
            reason = f"{quoted(bucket)} is not the name of a bucket: 3 to 63 of a-z, 0-9, '.' and '-'"
            raise ConfigError([Problem(key, reason, hint="write s3://BUCKET/PREFIX")])
        used.append(Location(bucket, prefix.strip("/"), is_written=key == "checkpoint.mirror"))
    return used


def parallelcluster_access(config: RunConfig) -> list[Manifest]:
    """Entries of ParallelCluster's `S3Access`, one per bucket, since access to keys does not allow listing."""
    written: dict[str, bool] = {}
    for location in locations(config):
        written[location.bucket] = written.get(location.bucket, False) or location.is_written
    return [{"BucketName": bucket, "EnableWriteAccess": is_written} for bucket, is_written in written.items()]


def iam_policy(config: RunConfig) -> Manifest:
    """IAM policy of nodes for the S3 objects that a run uses; empty if the run uses no objects."""
    used = locations(config)
    if not used:
        return {}
    read: list[str] = []
    written: list[str] = []
    for location in dict.fromkeys(used):
        read += _arns(location)
        if location.is_written:
            written += _arns(location)
    statements = [
        _statement(["s3:ListBucket"], sorted({f"arn:aws:s3:::{location.bucket}" for location in used})),
        _statement(["s3:GetObject"], read),
    ]
    if written:
        statements.append(_statement(["s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"], written))
    return {"Version": "2012-10-17", "Statement": statements}


def volumes(claim: str, size_gib: int, subnet: str) -> dict[str, str]:
    """Render the files of the volume claim for three kinds of storage; a cluster needs one of them."""
    size = f"{size_gib}Gi"
    access_points = {"provisioningMode": "efs-ap", "fileSystemId": _FILE_SYSTEM, "directoryPerms": "700"}
    efs = _storage_class("nxtrain-efs", "efs.csi.aws.com", access_points)
    file_system = {
        "subnetId": subnet,
        "securityGroupIds": "sg-00000000000000000",
        "deploymentType": DEPLOYMENT,
        "perUnitStorageThroughput": str(THROUGHPUT_MB_S),
        "fileSystemTypeVersion": "2.15",
    }
    fsx = {**_storage_class("nxtrain-fsx", "fsx.csi.aws.com", file_system), "mountOptions": ["flock"]}
    return {
        "fsx-static.yaml": dump_yaml([_fsx_volume(size), _claim(claim, "", size, volume="nxtrain-fsx")], _FSX_STATIC),
        "fsx-dynamic.yaml": dump_yaml([fsx, _claim(claim, "nxtrain-fsx", size)], _FSX_DYNAMIC),
        "efs.yaml": dump_yaml([efs, _claim(claim, "nxtrain-efs", size)], _EFS),
    }


def _fsx_volume(size: str) -> Manifest:
    address = f"{_FILE_SYSTEM}.fsx.us-east-1.amazonaws.com"
    spec = {
        "capacity": {"storage": size},
        "volumeMode": "Filesystem",
        "accessModes": ["ReadWriteMany"],
        "mountOptions": ["flock"],
        "persistentVolumeReclaimPolicy": "Retain",
        "storageClassName": "",
        "csi": {
            "driver": "fsx.csi.aws.com",
            "volumeHandle": _FILE_SYSTEM,
            "volumeAttributes": {"dnsname": address, "mountname": "abcdefgh"},
        },
    }
    return {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "nxtrain-fsx"}, "spec": spec}


def _storage_class(name: str, provisioner: str, parameters: Manifest) -> Manifest:
    """Kubernetes storage class whose volumes are kept when their claim is deleted, since they contain checkpoints."""
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": name},
        "provisioner": provisioner,
        "parameters": parameters,
        "reclaimPolicy": "Retain",
    }


def _claim(name: str, storage_class: str, size: str, volume: str = "") -> Manifest:
    spec: Manifest = {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": storage_class,
        "resources": {"requests": {"storage": size}},
    }
    if volume:
        spec["volumeName"] = volume
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": spec}


def _statement(actions: Sequence[str], resources: Sequence[str]) -> Manifest:
    return {"Effect": "Allow", "Action": list(actions), "Resource": list(resources)}


def _arns(location: Location) -> list[str]:
    """ARNs of an object and of all objects in a folder of that name, with wildcard characters escaped."""
    bucket = f"arn:aws:s3:::{location.bucket}"
    key = re.sub(r"[*?$]", lambda match: f"${{{match[0]}}}", location.key)
    if not key:
        return [f"{bucket}/*"]
    return [f"{bucket}/{key}", f"{bucket}/{key}/*"]
