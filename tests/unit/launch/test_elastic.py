"""Elastic runs continue with the machines that are left; a launch names a number of machines that does not work."""

from __future__ import annotations

import pytest

from nxtrain.common.errors import ConfigError
from nxtrain.launch.targets.job import LaunchOptions
from nxtrain.launch.targets.render import launch_on
from tests.support import ROOT
from tests.support.launch_cases import local_command


def test_agents_of_an_elastic_run_take_a_range_of_machines() -> None:
    demo = ROOT / "configs/demo.toml"
    overrides = ["cluster.nodes=4", "parallel.dp=0", "train.global_batch=48"]
    command = local_command(demo, overrides, 1, {}, first_node="n1", min_nodes=2)
    assert "--nnodes=2:4" in command.argv
    assert "--nnodes=4" in local_command(demo, overrides, 1, {}, first_node="n1").argv
    with pytest.raises(ConfigError, match=r"use parallel\.dp=0"):
        local_command(demo, [*overrides, "parallel.dp=4"], 1, {}, first_node="n1", min_nodes=2)


@pytest.mark.parametrize(("batch", "ends"), [(64, True), (192, False)])
def test_a_number_of_machines_with_which_an_elastic_run_would_end_is_named(
    batch: int, ends: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rendezvous takes all machines that are left: three here, whose replicas do not divide 64 sequences."""
    demo = ROOT / "configs/demo.toml"
    overrides = ["cluster.nodes=4", "parallel.dp=0", "train.micro_batch=2", f"train.global_batch={batch}"]
    said = "warning: with 3 of the 4 machines, the run would end with exit code 2: train.global_batch: 64 is not"
    command = local_command(demo, overrides, 8, {}, first_node="n1", min_nodes=2)
    assert (said in str(command)) is ends
    gpus = [*overrides, "backend.name=cuda", "cluster.instance=p5.48xlarge"]
    launch_on("slurm", demo, gpus, LaunchOptions(min_nodes=2), out=None, dry_run=True)
    assert (said in capsys.readouterr().err) is ends
    assert "warning" not in str(local_command(demo, overrides, 8, {}, first_node="n1")), "all machines are needed"
