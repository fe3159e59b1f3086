"""Environment variables of ranks on NVIDIA GPUs, for torch's allocator and NCCL; values of the shell win."""

from __future__ import annotations

from collections.abc import Mapping

from nxtrain.common.machines import GPU, INSTANCE_TYPES
from nxtrain.config.schema import ON_GPUS, RunConfig
from nxtrain.launch.environment import Variable, with_shell_values

_ALLOCATOR = "https://docs.pytorch.org/docs/2.9/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf"
_NCCL = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
_EFA = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-start-nccl.html"

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
"""Environment variable of torch's CUDA allocator; torch 2.9 to 2.15 read this name."""


RECORDING = Variable(
    "TORCH_FR_BUFFER_SIZE",
    "2000",
    "torch records the newest collectives of each rank, so that the report of a hang names the late one",
    "torch 2.9, torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp, which warns of its older name",
)
QUIET_TRANSFERS = Variable(
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING",
    "false",
    "transfers of a pipeline have a communicator for each pair of stages, in which nothing can be serialized",
    "torch 2.9, torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp",
)
NO_END_BY_NCCL = Variable(
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "0",
    "recovery.in_job=true: after the loss of a rank, nxtrain ends the groups, and torch must not end the process",
    "torch 2.9, `_abort_process_group` in torch/distributed/distributed_c10d.py",
)


def gpu_variables(config: RunConfig, environ: Mapping[str, str]) -> tuple[Variable, ...]:
    """Environment variables of a rank of `backend.name=cuda`; empty for other backends."""
    if config.backend.name != ON_GPUS:
        return ()
    variables = [
        Variable("NCCL_DEBUG", "WARN", "NCCL prints the reason of an error, and nothing else", _NCCL),
        RECORDING,
        QUIET_TRANSFERS,
    ]
    if "PYTORCH_ALLOC_CONF" not in environ:  # which the older name would silence
        reason = "segments of memory grow, so that sizes that change leave no gaps between them"
        variables.append(Variable(ALLOCATOR, "expandable_segments:True", reason, _ALLOCATOR))
    if config.recovery.in_job:
        variables.append(NO_END_BY_NCCL)
    if config.cluster.nodes > 1:
        reason = "NCCL's bootstrap avoids these interfaces, which do not leave the machine"
        variables.append(Variable("NCCL_SOCKET_IFNAME", "^docker,lo,veth", reason, _NCCL))
        machine = INSTANCE_TYPES.get(config.cluster.instance)
        if machine is not None and machine.resource == GPU and machine.efa_devices:
            reason = "libfabric of aws-ofi-nccl uses EFA, and fails instead of falling back to TCP"
            variables.append(Variable("FI_PROVIDER", "efa", reason, _EFA))
            if machine.name.startswith("p4d"):
                reason = "the network reads and writes the memory of GPUs; later instances do so by themselves"
                variables.append(Variable("FI_EFA_USE_DEVICE_RDMA", "1", reason, _EFA))
    return with_shell_values(variables, environ)
