"""Dockerfile of nxtrain for each kind of device, with the device's packages and administration tools."""

from __future__ import annotations

from nxtrain.backends.neuron.sdk import PACKAGE_INDEX

CPU_INDEX = "https://download.pytorch.org/whl/cpu"

_BASES = {
    "neuron": "public.ecr.aws/docker/library/ubuntu:22.04",
    "neuron-native": "public.ecr.aws/docker/library/ubuntu:24.04",
    "gpu": "nvidia/cuda:12.8.1-cudnn-devel-ubuntu24.04",
    "xla": "public.ecr.aws/docker/library/ubuntu:24.04",
    "cpu": "public.ecr.aws/docker/library/ubuntu:24.04",
}
"""Base images by kind of device; Ubuntu 22.04 has Python 3.10, and 24.04 has 3.12, see docs/trainium.md."""

_EXTRAS = {"neuron": "neuron,s3", "neuron-native": "neuron-native,s3", "gpu": "cuda,s3", "xla": "xla,s3", "cpu": "s3"}

_INDICES = {
    "neuron": f"--extra-index-url {PACKAGE_INDEX} ",
    "neuron-native": f"--extra-index-url {PACKAGE_INDEX} --extra-index-url {CPU_INDEX} ",
    "cpu": f"--extra-index-url {CPU_INDEX} ",
}

_TOOLS = """\
# Tools and runtime of the Neuron SDK; the driver belongs to the machine.
RUN curl -fsSL https://apt.repos.neuron.amazonaws.com/GPG-PUB-KEY-AMAZON-AWS-NEURON.PUB \\
        -o /etc/apt/trusted.gpg.d/neuron.asc \\
    && . /etc/os-release \\
    && echo "deb https://apt.repos.neuron.amazonaws.com $VERSION_CODENAME main" > /etc/apt/sources.list.d/neuron.list \\
    && apt-get update && apt-get install --yes --no-install-recommends \\
        aws-neuronx-collectives aws-neuronx-runtime-lib aws-neuronx-tools \\
    && rm -rf /var/lib/apt/lists/*
"""

_EFA = """\
# libfabric with EFA, and Open MPI; without the kernel module, which belongs to the machine.
RUN curl -fsSL https://efa-installer.amazonaws.com/aws-efa-installer-latest.tar.gz | tar -xz -C /tmp \\
    && cd /tmp/aws-efa-installer && apt-get update \\
    && ./efa_installer.sh -y -g --skip-kmod --skip-limit-conf --no-verify \\
    && rm -rf /tmp/aws-efa-installer /var/lib/apt/lists/*
"""

_PLUGIN = """\
# NCCL loads the plugin for libfabric, which the installer brings, by the linker's cache; else NCCL would take TCP.
RUN printf '%s\\n' /opt/amazon/efa/lib /opt/amazon/ofi-nccl/lib64 /opt/amazon/ofi-nccl/lib/x86_64-linux-gnu \\
        > /etc/ld.so.conf.d/ofi-nccl.conf \\
    && ldconfig && ldconfig -p | grep libnccl-net
"""

_FILE = """\
# Image for nxtrain on {lane}; in a checkout: docker build -t nxtrain-{lane} -f Dockerfile .
FROM {base}
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
RUN apt-get update && apt-get install --yes --no-install-recommends \\
        ca-certificates curl g++ openmpi-bin openssh-client openssh-server python3-dev python3-venv \\
    && rm -rf /var/lib/apt/lists/*
# The MPI operator mounts keys whose owner ssh would refuse, and starts sshd.
RUN mkdir -p /run/sshd \\
    && printf 'Host *\\n StrictHostKeyChecking no\\n UserKnownHostsFile /dev/null\\n' \\
        > /etc/ssh/ssh_config.d/mpi.conf \\
    && echo 'StrictModes no' > /etc/ssh/sshd_config.d/mpi.conf
{devices}ENV PATH={path}
COPY . /src
RUN python3 -m venv /opt/nxtrain && pip install {indices}'/src[{extras}]'
WORKDIR /fsx
CMD ["nxtrain", "--help"]
"""


def render(lane: str) -> str:
    """Render the Dockerfile for a kind of device: neuron, neuron-native, gpu, xla or cpu."""
    path = "/opt/nxtrain/bin:$PATH"
    devices = ""
    if lane.startswith("neuron"):
        path = "/opt/nxtrain/bin:/opt/aws/neuron/bin:/opt/amazon/efa/bin:$PATH"
        devices = _TOOLS + _EFA
    elif lane == "gpu":
        path = "/opt/nxtrain/bin:/opt/amazon/efa/bin:$PATH"
        devices = _EFA + _PLUGIN
    return _FILE.format(
        lane=lane,
        base=_BASES[lane],
        devices=devices,
        path=path,
        indices=_INDICES.get(lane, ""),
        extras=_EXTRAS[lane],
    )
