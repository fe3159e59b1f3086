"""Files that create clusters: AWS ParallelCluster for Slurm, and eksctl for Kubernetes.

The files have placeholders for the user's subnets, keys and zones.

Sources: https://docs.aws.amazon.com/parallelcluster/latest/ug/cluster-configuration-file-v3.html,
https://eksctl.io/usage/schema, https://docs.aws.amazon.com/eks/latest/userguide/node-efa.html.
"""

from __future__ import annotations

from nxtrain.common.errors import ConfigError, Problem
from nxtrain.common.machines import NEURON
from nxtrain.launch.targets.job import SHARED, ClusterJob
from nxtrain.launch.targets.storage import DEPLOYMENT, THROUGHPUT_MB_S, iam_policy, parallelcluster_access, volumes
from nxtrain.launch.targets.yaml_text import dump_yaml

_SUBNET = "subnet-00000000000000000"
_PUBLIC_SUBNET = "subnet-11111111111111111"
_AMI = "ami-00000000000000000"
_ZONE = "us-east-1a"

_PARALLELCLUSTER = """\
AWS ParallelCluster for {nodes} x {instance}; written by nxtrain launch --target parallelcluster.
Replace Region, the subnets and the key by your own. The nodes' subnet is private, with a NAT gateway: machines
with several network cards get no public address.
{driver}
    pcluster create-cluster --cluster-name nxtrain --cluster-configuration parallelcluster.yaml

The file system outlives the cluster. aws fsx delete-file-system deletes it.
"""

_DRIVER = """\
ParallelCluster's images have no Neuron driver. Replace CustomAmi by an image that you have built with the driver:
https://docs.aws.amazon.com/parallelcluster/latest/ug/building-custom-ami-v3.html
"""

_EKS = """\
EKS for {nodes} x {instance}; written by nxtrain launch --target eks.
Replace region and zones by those of your capacity. eksctl installs the device plugins of Neuron and EFA.
amazon-cloudwatch-observability shows the devices in CloudWatch, which AWS charges for; leave it out without need.

    eksctl create cluster -f eks.yaml
    kubectl apply -f fsx-static.yaml    # or fsx-dynamic.yaml, or efs.yaml: the claim of the runs
"""

_ADDONS = (
    "vpc-cni",
    "coredns",
    "kube-proxy",
    "aws-fsx-csi-driver",
    "aws-efs-csi-driver",
    "amazon-cloudwatch-observability",  # its DaemonSets record GPUs, Neuron devices and EFA
)

_ADDON_POLICIES = {"cloudWatch": True, "efs": True, "fsx": True}
"""IAM permissions of the nodes for add-ons."""


def render_parallelcluster(job: ClusterJob) -> str:
    """Render the configuration of a ParallelCluster: Slurm, a queue of the run's machines, and a shared file system."""
    _require_instance(job)
    compute: dict[str, object] = {
        "Name": "nodes",
        "InstanceType": job.machine.name,
        "MinCount": 0,
        "MaxCount": job.nodes + 1,  # one spare node, for a failure
    }
    if job.machine.efa_devices:
        compute["Efa"] = {"Enabled": True}
    access = parallelcluster_access(job.config)
    queue: dict[str, object] = {
        "Name": "train",
        "ComputeResources": [compute],
        "Networking": {"SubnetIds": [_SUBNET], "PlacementGroup": {"Enabled": True}},
        "ComputeSettings": {"LocalStorage": {"RootVolume": {"Size": 512}}},  # compiled graphs
    }
    driver = ""
    if job.machine.resource == NEURON:
        driver = _DRIVER
        queue["Image"] = {"CustomAmi": _AMI}
    if job.lane == "gpu":
        queue["HealthChecks"] = {"Gpu": {"Enabled": True}}
    lustre = {
        "StorageCapacity": job.options.storage_gib,
        "DeploymentType": DEPLOYMENT,
        "PerUnitStorageThroughput": THROUGHPUT_MB_S,
        "DeletionPolicy": "Retain",  # checkpoints are on it
    }
    head: dict[str, object] = {
        "InstanceType": "m5.8xlarge",
        "Networking": {"SubnetId": _PUBLIC_SUBNET},
        "Ssh": {"KeyName": "your-key"},
    }
    if access:
        queue["Iam"] = {"S3Access": access}
        head["Iam"] = {"S3Access": access}
    cluster = {
        "Region": "us-east-1",
        "Image": {"Os": "ubuntu2204"},
        "HeadNode": head,
        "Scheduling": {
            "Scheduler": "slurm",
            "SlurmSettings": {"CustomSlurmSettings": [{"KillWait": 300}, {"SlurmdTimeout": 120}]},
            "SlurmQueues": [queue],
        },
        "SharedStorage": [{"Name": "fsx", "MountDir": SHARED, "StorageType": "FsxLustre", "FsxLustreSettings": lustre}],
    }
    head_lines = _PARALLELCLUSTER.format(nodes=job.nodes, instance=job.machine.name, driver=driver)
    return dump_yaml([cluster], head_lines)


def render_eks(job: ClusterJob) -> dict[str, str]:
    """Render the files of an EKS cluster with a node group of the run's machines, and of its shared storage."""
    _require_instance(job)
    permissions: dict[str, object] = {"withAddonPolicies": _ADDON_POLICIES}
    policy = iam_policy(job.config)
    if policy:
        permissions["attachPolicy"] = policy
    nodes = {
        "name": "train",
        "instanceType": job.machine.name,
        "minSize": 0,
        "desiredCapacity": job.nodes,
        "maxSize": job.nodes + 1,  # a spare one, for a node that dies
        "volumeSize": 512,
        "availabilityZones": [_ZONE],
        "privateNetworking": True,
        "efaEnabled": bool(job.machine.efa_devices),
        "iam": permissions,
    }
    system = {
        "name": "system",
        "instanceType": "m5.2xlarge",
        "desiredCapacity": 2,
        "iam": {"withAddonPolicies": _ADDON_POLICIES},
    }
    cluster = {
        "apiVersion": "eksctl.io/v1alpha5",
        "kind": "ClusterConfig",
        "metadata": {"name": "nxtrain", "region": "us-east-1", "version": "1.33"},
        "availabilityZones": [_ZONE, "us-east-1b"],
        "iam": {"withOIDC": True},
        "addons": [{"name": name} for name in _ADDONS],
        "managedNodeGroups": [system, nodes],
    }
    text = dump_yaml([cluster], _EKS.format(nodes=job.nodes, instance=job.machine.name))
    return {"eks.yaml": text, **volumes(job.options.claim, job.options.storage_gib, _SUBNET)}


def _require_instance(job: ClusterJob) -> None:
    if not job.machine.name:
        raise ConfigError(
            [
                Problem(
                    "cluster.instance", "not set, but a cluster needs an instance type; set it, such as trn1.32xlarge"
                )
            ]
        )
