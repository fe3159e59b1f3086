"""Folders of runs in containers: those that are lost with a container are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from nxtrain.common.errors import ConfigError
from nxtrain.launch.targets.job import LaunchOptions
from nxtrain.launch.targets.render import RENDERERS
from tests.unit.launch.test_targets import job

IN_A_CONTAINER = [
    ("kubernetes", "/scratch/7b", LaunchOptions(), "in /fsx"),
    ("kubernetes", "/fsx2/7b", LaunchOptions(), "in /fsx"),
    ("slurm", "/fsx/7b", LaunchOptions(image="i"), "--mounts /fsx:/fsx"),
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
    assert RENDERERS[target](job(f"run.dir={folder}", "checkpoint.mirror=s3://bucket/7b", options=options))


@pytest.mark.parametrize(
    ("target", "folder", "options"),
    [
        ("kubernetes", "/fsx/7b", LaunchOptions()),
        ("kubernetes", "runs/7b", LaunchOptions()),
        ("slurm", "/fsx/7b", LaunchOptions()),
        ("slurm", "runs/7b", LaunchOptions(image="i")),
        ("slurm", str(Path("runs/7b").absolute()), LaunchOptions(image="i")),
        ("slurm", "/fsx/7b", LaunchOptions(image="i", mounts="/data:/data,/lustre:/fsx")),
    ],
)
def test_folders_that_outlive_a_container_are_accepted(target: str, folder: str, options: LaunchOptions) -> None:
    assert RENDERERS[target](job(f"run.dir={folder}", options=options))
