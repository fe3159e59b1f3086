"""Containers and steps of Slurm jobs, permissions for buckets, and sizes of shared storage."""

from __future__ import annotations

import fnmatch
import re
import shlex
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from nxtrain.common.errors import ConfigError
from nxtrain.launch.targets import clusters, storage
from nxtrain.launch.targets.job import LaunchOptions
from nxtrain.launch.targets.render import RENDERERS
from nxtrain.launch.targets.slurm import container_options, enroot_uri, render_generic
from tests.support.launch_cases import CASES
from tests.unit.launch.test_targets import NASTY, in_bash, job

IN_S3 = ("data.source=arrow", "data.path=s3://corpora/docs.arrow")


@pytest.mark.parametrize(
    ("image", "uri"),
    [
        ("ubuntu:24.04", "ubuntu:24.04"),
        ("nvidia/cuda:12.8.1", "nvidia/cuda:12.8.1"),
        ("nvcr.io/nvidia/pytorch:25.01-py3", "nvcr.io#nvidia/pytorch:25.01-py3"),
        ("localhost:5000/nxtrain", "localhost:5000#nxtrain"),
        ("nvcr.io#nvidia/pytorch", "nvcr.io#nvidia/pytorch"),
        ("/fsx/images/nxtrain.sqsh", "/fsx/images/nxtrain.sqsh"),
        ("./nxtrain.sqsh", "./nxtrain.sqsh"),
    ],
)
def test_enroot_separates_the_registry_by_a_hash(image: str, uri: str) -> None:
    assert enroot_uri(image) == uri


def test_options_of_a_container_are_words_of_their_own_whatever_the_texts(tmp_path: Path) -> None:
    @settings(max_examples=25)
    @given(NASTY, NASTY)
    def check(image: str, mounts: str) -> None:
        done = in_bash(f"printf '%s\\0' {container_options(image, mounts)}", folder=tmp_path, HOME="/root")
        assert done.stdout.decode().split("\0")[:-1] == [
            f"--container-image={enroot_uri(image)}",
            f"--container-mounts={tmp_path}:{tmp_path},{mounts}",
            f"--container-workdir={tmp_path}",
        ]
        assert list(tmp_path.iterdir()) == []

    check()


def test_a_job_runs_in_a_container_only_if_asked() -> None:
    (text,) = CASES["slurm_container"].files().values()
    (line,) = [line for line in text.splitlines() if line.strip().startswith("srun")]
    assert "--container-mounts=$PWD:$PWD,/fsx:/fsx" in shlex.split(line)
    assert "container" not in "".join(CASES["slurm"].files().values())


def test_slurm_waits_for_the_compilers_of_all_nodes(tmp_path: Path) -> None:
    """After the end of one node, srun kills the tasks of others within --wait seconds; 0 means without limit."""
    for name, text in {"srun": 'echo "$@" >>calls', "scontrol": "echo n1"}.items():
        program = tmp_path / name
        program.write_text(f"#!/bin/bash\n{text}\n", encoding="ascii")
        program.chmod(0o755)
    for script in (RENDERERS["slurm"](job())["train.sbatch"], render_generic()):
        (tmp_path / "calls").unlink(missing_ok=True)
        environ = {"SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_NODELIST": "n1", "NXTRAIN_STEPS": "compile launch"}
        done = in_bash(script, folder=tmp_path, **environ)
        assert done.returncode == 0, done.stderr
        calls = (tmp_path / "calls").read_text(encoding="ascii").splitlines()
        assert [line.split()[:3] for line in calls] == [
            ["--wait=0", "nxtrain", "compile"],
            ["--wait=60", "nxtrain", "launch"],
        ]


@pytest.mark.parametrize(("cache", "mounted"), [("/nvme/graphs", "/nvme/graphs"), ("compile_cache/{host}", "")])
def test_compiled_graphs_outlive_the_container_that_compiled_them(cache: str, mounted: str) -> None:
    """Enroot removes a container after its step, and mounts no folder of the node such as /var/tmp."""
    for target in ("slurm", "hyperpod"):
        for mounts in ("", "/fsx:/fsx"):
            run = job(f"compile.cache_dir={cache}", options=LaunchOptions(image="nxtrain", mounts=mounts))
            script = RENDERERS[target](run)["train.sbatch"]
            bound = ",".join(filter(None, ["$PWD:$PWD", mounts, f"{mounted}:{mounted}" if mounted else ""]))
            (line,) = [line for line in script.splitlines() if "--container-image" in line]
            assert f"--container-mounts={bound}" in shlex.split(line)
            assert ("srun mkdir -p /nvme/graphs || exit" in script) == bool(mounted)


def allowed(policy: storage.Manifest, action: str, resource: str) -> bool:
    """True if IAM allows an action: `*` and `?` are patterns, and `${*}` is an asterisk."""
    for statement in policy["Statement"]:
        patterns = [re.sub(r"\$\{([*?$])\}", r"[\1]", name) for name in statement["Resource"]]
        matches = any(fnmatch.fnmatchcase(resource, pattern) for pattern in patterns)
        if matches and action in statement["Action"]:
            return True
    return False


@settings(max_examples=30)
@given(prefix=st.text("ab*?$-_.", min_size=1), other=st.text("ab*?$-_.", min_size=1))
def test_nodes_may_read_and_write_what_the_run_names_and_nothing_else(prefix: str, other: str) -> None:
    config = job(f'checkpoint.mirror="s3://checkpoints/{prefix}"', *IN_S3).config
    policy = storage.iam_policy(config)
    inside, outside = (f"arn:aws:s3:::checkpoints/{key}/step" for key in (prefix, other))
    assert allowed(policy, "s3:PutObject", inside)
    assert allowed(policy, "s3:PutObject", outside) == (prefix == other)
    assert allowed(policy, "s3:GetObject", "arn:aws:s3:::corpora/docs.arrow")
    assert not allowed(policy, "s3:PutObject", "arn:aws:s3:::corpora/docs.arrow")
    assert not allowed(policy, "s3:GetObject", "arn:aws:s3:::corpora/other.arrow")


def test_a_run_without_buckets_gets_no_permission_and_one_with_many_gets_each_once() -> None:
    assert storage.iam_policy(job().config) == {}
    assert "S3Access" not in clusters.render_parallelcluster(job())
    run = job("checkpoint.mirror=s3://corpora/run", *IN_S3)
    assert storage.parallelcluster_access(run.config) == [{"BucketName": "corpora", "EnableWriteAccess": True}]


def test_a_pattern_is_no_bucket() -> None:
    with pytest.raises(ConfigError, match="is not the name of a bucket"):
        clusters.render_eks(job("checkpoint.mirror=s3://*/run"))


@pytest.mark.parametrize(("size", "fits"), [(1200, True), (2400, True), (4800, True), (57_600, True), (3600, False)])
def test_sizes_are_those_of_fsx(size: int, fits: bool) -> None:
    assert (storage.check_storage(size) == []) == fits


def test_pods_that_restart_alone_leave_the_restart_to_the_operator() -> None:
    """They extract graphs together, and a new pod would wait for pods whose agents wait for its ranks."""
    for target, file, is_alone in (
        ("kubernetes", "pytorchjob.yaml", True),
        ("hyperpod", "pytorchjob.yaml", True),
        ("kubernetes", "jobset.yaml", False),
        ("kubernetes", "mpijob.yaml", False),
    ):
        for nodes in (1, 4):
            text = RENDERERS[target](job(f"cluster.nodes={nodes}", f"parallel.dp={4 * nodes}"))[file]
            assert ("- recovery.max_restarts=0" in text.replace('"', "")) == (is_alone and nodes > 1), file
    gpu = CASES["kubernetes_elastic"].files()["pytorchjob.yaml"]
    assert "max_restarts=0" not in gpu
    _, manifest = yaml.safe_load_all(RENDERERS["hyperpod"](job())["pytorchjob.yaml"])
    assert manifest["spec"]["runPolicy"]["backoffLimit"] == 4 * 100, "the operator adds the restarts of all pods"


def test_nodes_of_a_parallelcluster_have_drivers_and_lie_behind_a_gateway() -> None:
    """ParallelCluster's images have drivers of GPUs alone; nodes with several network cards get no public address."""
    for name, has_driver in (("parallelcluster_gpu", True), ("slurm", False)):
        (cluster,) = yaml.safe_load_all(clusters.render_parallelcluster(CASES[name].job()))
        (queue,) = cluster["Scheduling"]["SlurmQueues"]
        assert ("CustomAmi" in queue.get("Image", {})) != has_driver
        assert cluster["HeadNode"]["Networking"]["SubnetId"] not in queue["Networking"]["SubnetIds"]


def test_volumes_have_the_claim_of_the_runs_and_outlive_the_cluster() -> None:
    files = clusters.render_eks(job(options=LaunchOptions(claim="mine", storage_gib=57_600)))
    for name in ("fsx-static.yaml", "fsx-dynamic.yaml", "efs.yaml"):
        source, claim = yaml.safe_load_all(files[name])
        assert claim["metadata"]["name"] == "mine"
        assert claim["spec"]["resources"]["requests"]["storage"] == "57600Gi"
        assert claim["spec"]["storageClassName"] == ("" if "static" in name else source["metadata"]["name"])
        kept = source["spec"]["persistentVolumeReclaimPolicy"] if "static" in name else source["reclaimPolicy"]
        assert kept == "Retain"
    assert "DeletionPolicy: Retain" in clusters.render_parallelcluster(job())
