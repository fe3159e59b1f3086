"""Folders of runs in containers: those that are lost with a container are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from nxtrain.common.errors import ConfigError
from nxtrain.launch.targets.job import LaunchOptions
from nxtrain.launch.targets.render import RENDERERS, launch_on
from tests.unit.launch.test_targets import RECIPE, SMALL, job

IN_A_CONTAINER = [
    ("kubernetes", "/scratch/7b", LaunchOptions(), "in /fsx"),
    ("kubernetes", "/fsx2/7b", LaunchOptions(), "in /fsx"),
    ("kubernetes", "/fsx/../scratch/7b", LaunchOptions(), "in /fsx"),
    ("kubernetes", "../7b", LaunchOptions(), "in /fsx"),
    ("slurm", "/fsx/7b", LaunchOptions(image="i"), "--mounts /fsx:/fsx"),
    ("slurm", "../7b", LaunchOptions(image="i", mounts="/fsx:/fsx"), f"--mounts {Path.cwd().parent}:/"),
    ("slurm", "/fsx/7b", LaunchOptions(image="i", mounts="/fsx/data:/fsx/data,/fsx:/other:ro"), "--mounts /fsx:/fsx"),
]


@pytest.mark.parametrize(("target", "folder", "options", "way_out"), IN_A_CONTAINER)
def test_checkpoints_on_the_disk_of_a_container_are_refused(
    target: str, folder: str, options: LaunchOptions, way_out: str
) -> None:
    with pytest.raises(
        ConfigError, match=rf"run\.dir \(override\): {folder} is on the disk of a container(?s:.*){way_out}"
    ):
        RENDERERS[target](job(f"run.dir={folder}", options=options))
    with pytest.raises(ConfigError, match=r"lost with the container; so are those of checkpoint\.mirror=/scratch/copy"):
        RENDERERS[target](job(f"run.dir={folder}", "checkpoint.mirror=/scratch/copy", options=options))
    assert RENDERERS[target](job(f"run.dir={folder}", "checkpoint.mirror=s3://bucket/7b", options=options))


@pytest.mark.parametrize(
    ("target", "folder", "options"),
    [
        ("kubernetes", "/fsx/7b", LaunchOptions()),
        ("kubernetes", "runs/7b", LaunchOptions()),
        ("kubernetes", "/fsx/other/../7b", LaunchOptions()),
        ("slurm", "/fsx/7b", LaunchOptions()),
        ("slurm", "runs/7b", LaunchOptions(image="i")),
        ("slurm", str(Path("runs/7b").absolute()), LaunchOptions(image="i")),
        ("slurm", "/fsx/7b", LaunchOptions(image="i", mounts="/data:/data,/lustre:/fsx")),
    ],
)
def test_folders_that_outlive_a_container_are_accepted(target: str, folder: str, options: LaunchOptions) -> None:
    assert RENDERERS[target](job(f"run.dir={folder}", options=options))


def test_a_mirror_in_the_shared_file_system_is_enough() -> None:
    assert RENDERERS["kubernetes"](job("run.dir=/scratch/7b", "checkpoint.mirror=/fsx/copy"))


def test_pods_of_hyperpod_that_lose_the_folder_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Under Slurm on HyperPod, the folder may be on a disk of the nodes."""
    for folder, is_lost in (("/data/7b", True), ("/fsx/7b", False)):
        overrides = (*SMALL, f"run.dir={folder}")
        launch_on("hyperpod", Path(RECIPE), overrides, LaunchOptions(), out=None, dry_run=True)
        warning = f"warning: pytorchjob.yaml: run.dir={folder} is on the disk of a container"
        assert (warning in capsys.readouterr().err) is is_lost


def test_machines_of_sagemaker_need_a_mirror_in_a_bucket() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.mirror: /fsx/copy is a folder, but the machines(?s:.*)s3://"):
        RENDERERS["sagemaker"](job("checkpoint.mirror=/fsx/copy"))
