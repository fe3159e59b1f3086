"""Variables of ranks on GPUs: as data, and in the launcher's script."""

from __future__ import annotations

import pytest

from nxtrain.config.load import load
from nxtrain.launch.gpu import NO_END_BY_NCCL, QUIET_TRANSFERS, RECORDING, gpu_variables
from tests.support import ROOT, TINY
from tests.support.launch_cases import local_command

ON_GPU = "backend.name=cuda"
QUIET = {RECORDING.name: "2000", QUIET_TRANSFERS.name: "false"}
ALONE = {"NCCL_DEBUG": "WARN", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **QUIET}
TOGETHER = {"NCCL_SOCKET_IFNAME": "^docker,lo,veth"}
EFA = {"FI_PROVIDER": "efa"}
RDMA = {"FI_EFA_USE_DEVICE_RDMA": "1"}


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        ([], ALONE),
        (["cluster.nodes=2"], ALONE | TOGETHER),
        (["cluster.nodes=2", "cluster.instance=p5.48xlarge"], ALONE | TOGETHER | EFA),
        (["cluster.nodes=2", "cluster.instance=p4d.24xlarge"], ALONE | TOGETHER | EFA | RDMA),
        (["cluster.instance=p5.48xlarge"], ALONE),
        (["recovery.in_job=true"], ALONE | {NO_END_BY_NCCL.name: "0"}),
    ],
)
def test_each_machine_has_its_variables_with_reason_and_source(overrides: list[str], wanted: dict[str, str]) -> None:
    actual = gpu_variables(load(TINY, [ON_GPU, *overrides]).config, {})
    assert {item.name: item.value for item in actual} == wanted
    assert all(item.reason and item.source for item in actual)


def test_values_of_the_shell_win_and_other_backends_have_none() -> None:
    config = load(TINY, [ON_GPU]).config
    result = {variable.name: variable.value for variable in gpu_variables(config, {"NCCL_DEBUG": "INFO"})}
    assert result == ALONE | {"NCCL_DEBUG": "INFO"}
    newer = {variable.name for variable in gpu_variables(config, {"PYTORCH_ALLOC_CONF": "backend:native"})}
    assert newer == ALONE.keys() - {"PYTORCH_CUDA_ALLOC_CONF"}
    assert gpu_variables(load(TINY, ["backend.name=cpu"]).config, {}) == ()


def test_the_launcher_sets_them_after_those_of_debugging() -> None:
    recipe = ROOT / "configs" / "llama3_2_1b_cuda.toml"
    shell = {"OMP_NUM_THREADS": "1"}
    assert local_command(recipe, [], None, shell).env == ALONE
    logged = local_command(recipe, ["recovery.debug=dist"], None, shell).env
    assert logged["NCCL_DEBUG"] == "INFO"
    assert logged["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
