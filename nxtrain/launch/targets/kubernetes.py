"""Kubernetes manifests of a run: PyTorchJob, MPIJob and JobSet, each with the configuration as a ConfigMap.

A pod uses a whole machine. `nxtrain launch` in each pod starts the ranks, and the pods connect by the name of the first
pod.

Sources: https://github.com/kubeflow/training-operator (v1.9), https://github.com/kubeflow/mpi-operator (v0.8),
https://github.com/kubernetes-sigs/jobset (v0.9), https://docs.aws.amazon.com/eks/latest/userguide/node-efa.html,
https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-hyperpod-eks-resiliency-job-auto-resume.html (annotations).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from nxtrain.common.errors import StoppedBySignal
from nxtrain.launch.exit_codes import FINAL, SHELL_FUNCTION
from nxtrain.launch.targets.job import CONFIG_FILE, SHARED, ClusterJob, check_run_folder
from nxtrain.launch.targets.yaml_text import dump_yaml

Manifest = dict[str, Any]

EFA = "vpc.amazonaws.com/efa"
"""Kubernetes resource name of an EFA device, from the EFA device plugin."""

FOLDER = "/etc/nxtrain"
"""Mount point of the ConfigMap in containers."""

_CONTAINER = "pytorch"
"""Name of the container, which the training operator requires."""

RESTARTS = 100
"""Restarts of pods or of the whole job, if recovery.max_restarts is 0."""

CACHE = "/var/tmp/neuron-compile-cache"
"""Folder of compiled graphs on the node's disk, used if compile.cache_dir would be on the shared file system."""

WAIT_S = 86_400
"""Seconds that pods wait for each other: machines for them may be new, and images of gigabytes are copied first."""

WAY_OUT = f"use a relative path, or one in {SHARED}, the file system of --claim"
"""Advice for a run whose folder pods would lose."""

_ENTRY = """\
{await_first}for step in {steps}; do
    {start}nxtrain $step "$@" & pid=$!
    trap 'kill -{signal} $pid' TERM    # Kubernetes signals this shell alone{reason}
    wait $pid; code=$?
    while kill -0 $pid 2>/dev/null; do wait $pid; code=$?; done    # a trap ends a wait early
    [ $code = 0 ] || break
done
"""

_AWAIT_FIRST = """\
trap 'exit 143' TERM
until getent hosts {first_node} >/dev/null; do sleep 2 & wait $!; done    # the first pod may start later
"""

_MPIRUN = "mpirun --allow-run-as-root -np {nodes} --map-by ppr:1:node --bind-to none -x PATH "
"""Start of the agents; the shells of ssh do not have the image's PATH."""

_FROM_128 = f"""\
{SHELL_FUNCTION}is_worth_restart $code && [ $code -lt 128 ] && let code+=128    # the operator restarts from 128 on
"""

_HEAD = """\
Written by nxtrain launch. Needs the {operator}, the device plugins of the nodes, an image,
and the claim of a file system that all nodes share.

    docker build -t IMAGE -f Dockerfile . && docker push IMAGE    # in a checkout of nxtrain
    kubectl apply -f {file}
"""


def render(job: ClusterJob) -> dict[str, str]:
    """Render the manifests of a run for each operator, by file name.

    Raises:
        ConfigError: The folder of the run is not in the file system that all nodes share.
    """
    check_run_folder(job, SHARED, [SHARED], WAY_OUT)
    return {
        "pytorchjob.yaml": _text("Kubeflow training operator", "pytorchjob.yaml", job, pytorch_job(job)),
        "mpijob.yaml": _text("MPI operator", "mpijob.yaml", job, mpi_job(job)),
        "jobset.yaml": _text("JobSet controller", "jobset.yaml", job, job_set(job)),
    }


def render_hyperpod(job: ClusterJob) -> dict[str, str]:
    """Render the manifest for HyperPod on EKS, which replaces a broken node and restarts the pods."""
    manifest = pytorch_job(job)
    manifest["spec"]["runPolicy"]["backoffLimit"] = _restarts(job) * job.nodes  # counts the restarts of all pods
    manifest["metadata"]["annotations"] = {
        "sagemaker.amazonaws.com/enable-job-auto-resume": "true",
        "sagemaker.amazonaws.com/job-max-retry-count": str(_restarts(job)),
    }
    worker = manifest["spec"]["pytorchReplicaSpecs"]["Worker"]
    worker["restartPolicy"] = "OnFailure"  # auto-resume supports no other kind
    worker["template"]["spec"] |= _worker(job, "OnFailure")
    selector = {"sagemaker.amazonaws.com/node-health-status": "Schedulable"}
    if job.machine.name:
        selector["node.kubernetes.io/instance-type"] = f"ml.{job.machine.name}"
    worker["template"]["spec"]["nodeSelector"] = selector
    return {"pytorchjob.yaml": _text("Kubeflow training operator", "pytorchjob.yaml", job, manifest)}


def pytorch_job(job: ClusterJob) -> Manifest:
    """Build a PyTorchJob manifest with one worker per machine."""
    spec: Manifest = {"runPolicy": {"cleanPodPolicy": "None", "backoffLimit": _restarts(job)}}
    if job.is_elastic:
        spec["elasticPolicy"] = {
            "rdzvBackend": "c10d",
            "minReplicas": job.min_nodes,
            "maxReplicas": job.nodes,
            "maxRestarts": _restarts(job),
        }
    template = {"spec": _worker(job, "ExitCode")}
    worker = {"replicas": job.nodes, "restartPolicy": "ExitCode", "template": template}
    return _manifest("kubeflow.org/v1", "PyTorchJob", job, {**spec, "pytorchReplicaSpecs": {"Worker": worker}})


def mpi_job(job: ClusterJob) -> Manifest:
    """Build an MPIJob manifest, whose launcher starts one agent per machine by mpirun."""
    start = _MPIRUN.format(nodes=job.nodes)
    worker = _pod(job, f"{job.name}-worker-0.{job.name}", "Never")
    container = worker["containers"][0]
    arguments = container.pop("args")
    launcher = {
        "containers": [
            {
                "name": _CONTAINER,
                "image": job.image,
                "workingDir": SHARED,
                "command": _command(job, "Never", start=start),
                "args": arguments,
                "volumeMounts": container["volumeMounts"][:2],
            }
        ],
        "volumes": worker["volumes"][:2],
        "terminationGracePeriodSeconds": worker["terminationGracePeriodSeconds"],
    }
    container["command"] = ["/usr/sbin/sshd", "-De"]
    container.pop("env", None)  # mpirun starts all agents at once
    spec = {
        "slotsPerWorker": 1,
        "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": _restarts(job)},
        "mpiReplicaSpecs": {
            "Launcher": {"replicas": 1, "restartPolicy": "Never", "template": {"spec": launcher}},
            "Worker": {"replicas": job.nodes, "restartPolicy": "Never", "template": {"spec": worker}},
        },
    }
    return _manifest("kubeflow.org/v2beta1", "MPIJob", job, spec)


def job_set(job: ClusterJob) -> Manifest:
    """Build a JobSet manifest of one indexed Job; final errors end the job, and preemptions are not restarts."""

    def rule(action: str, codes: list[int]) -> Manifest:
        return {"action": action, "onExitCodes": {"containerName": _CONTAINER, "operator": "In", "values": codes}}

    disrupted = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    stopped = rule("Ignore", [StoppedBySignal.exit_code])
    pod = {**_pod(job, f"{job.name}-node-0-0.{job.name}", "Never"), "restartPolicy": "Never"}
    one = {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [disrupted, rule("FailJob", sorted(FINAL)), stopped]},
        "template": {"spec": pod},
    }
    mistakes = {"name": "mistakes", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    spec = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": _restarts(job), "rules": [mistakes]},
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": one}}],
    }
    return _manifest("jobset.x-k8s.io/v1alpha2", "JobSet", job, spec)


def literal(text: str) -> str:
    """Escape text for commands and arguments of a manifest, in which Kubernetes replaces `$(NAME)` and `$$`.

    Source: https://kubernetes.io/docs/tasks/inject-data-application/define-interdependent-environment-variables.
    """
    return re.sub(r"\$(?=[$(])", "$$", text)


def _manifest(version: str, kind: str, job: ClusterJob, spec: Manifest) -> Manifest:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": job.name}, "spec": spec}


def _text(operator: str, file: str, job: ClusterJob, manifest: Manifest) -> str:
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": job.name}}
    return dump_yaml(
        [{**config, "data": {CONFIG_FILE: job.config_text}}, manifest], _HEAD.format(operator=operator, file=file)
    )


def _restarts(job: ClusterJob) -> int:
    return job.config.recovery.max_restarts or RESTARTS


def _worker(job: ClusterJob, restart_policy: str) -> Manifest:
    """Pod of a PyTorchJob, which restarts alone.

    All pods extract graphs together. So after the loss of one, the others end too, in place of a wait for its ranks.
    """
    pod = _pod(job, f"{job.name}-worker-0", restart_policy)
    if "compile" in job.steps and job.nodes > 1:
        pod["containers"][0]["args"].append("recovery.max_restarts=0")
    return pod


def _command(job: ClusterJob, restart_policy: str, *, first_node: str = "", start: str = "") -> list[str]:
    signal, reason = "TERM", ""
    await_first = ""
    if start:
        signal, reason = "USR1", ", and mpirun kills all ranks a second after TERM"
    if first_node:
        await_first = _AWAIT_FIRST.format(first_node=first_node)
    script = _ENTRY.format(
        await_first=await_first, steps=" ".join(job.steps), start=start, signal=signal, reason=reason
    )
    if restart_policy == "ExitCode":
        script += _FROM_128
    return ["bash", "-c", literal(f"{script}exit $code\n"), "nxtrain"]


def _pod(job: ClusterJob, first_node: str, restart_policy: str) -> Manifest:
    mounts = [
        {"name": "config", "mountPath": FOLDER},
        {"name": "shared", "mountPath": SHARED},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    volumes: list[Manifest] = [
        {"name": "config", "configMap": {"name": job.name}},
        {"name": "shared", "persistentVolumeClaim": {"claimName": job.options.claim}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    arguments = list(job.arguments(f"{FOLDER}/{CONFIG_FILE}", first_node))
    if "compile" in job.steps:
        cache = job.config.compile.cache_dir
        folder = str(cache)
        if not cache.is_absolute() or "{" in folder:
            folder = CACHE
        if folder != str(cache):
            arguments.append(f"compile.cache_dir={folder}")
        mounts.append({"name": "graphs", "mountPath": folder})
        volumes.append({"name": "graphs", "hostPath": {"path": folder, "type": "DirectoryOrCreate"}})
    is_one_of_many = job.nodes > 1
    container: Manifest = {
        "name": _CONTAINER,
        "image": job.image,
        "workingDir": SHARED,
        "command": _command(job, restart_policy, first_node=first_node if is_one_of_many else ""),
        "args": [literal(argument) for argument in arguments],
        "resources": _resources(job),
        "volumeMounts": mounts,
    }
    if is_one_of_many:
        container["env"] = [{"name": "PET_RDZV_CONF", "value": f"join_timeout={WAIT_S}"}]  # an option of torchrun
    if job.machine.efa_devices:
        container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}  # pinned memory for EFA
    pod: Manifest = {"containers": [container], "volumes": volumes}
    if job.machine.name:
        pod["nodeSelector"] = {"node.kubernetes.io/instance-type": job.machine.name}
    return {**pod, "terminationGracePeriodSeconds": math.ceil(job.config.recovery.grace_s) + 30}


def _resources(job: ClusterJob) -> Mapping[str, Manifest]:
    machine = job.machine
    devices: Manifest = {}
    if machine.resource:
        devices[machine.resource] = machine.accelerators
    if machine.efa_devices:
        devices |= {EFA: machine.efa_devices, "hugepages-2Mi": "5120Mi"}  # libfabric's buffers
    requests = {"cpu": job.nproc, **devices}  # a pod with huge pages must ask for processors or memory, too
    if not devices:
        return {"requests": requests}
    return {"limits": devices, "requests": requests}
