"""Runs whose files for each target are kept in `tests/golden/launch`; as a program, writes them again.

    python -m tests.support.launch_cases

Validators that the tests do not have judge these files: `scripts/validate_launch.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nxtrain.common.errors import ConfigError
from nxtrain.config.load import load
from nxtrain.launch.local import Command
from nxtrain.launch.local import render as render_local
from nxtrain.launch.targets import docker
from nxtrain.launch.targets.job import ClusterJob, LaunchOptions, resolve_job
from nxtrain.launch.targets.render import RENDERERS
from nxtrain.launch.targets.slurm import render_generic
from tests.support import ROOT

GOLDEN = ROOT / "tests/golden/launch"


def local_command(
    path: Path,
    overrides: Sequence[str],
    nproc: int | None,
    environ: Mapping[str, str],
    *,
    first_node: str = "",
    min_nodes: int = 0,
) -> Command:
    """Command that `nxtrain launch` starts on this machine; its problems are an error."""
    loaded = load(path, overrides)
    command = render_local(loaded, path, overrides, nproc, environ, first_node=first_node, min_nodes=min_nodes)
    if command.problems:
        raise ConfigError(command.problems)
    return command


@dataclass(frozen=True)
class Case:
    """A launch."""

    target: str
    config: str
    overrides: tuple[str, ...] = ()
    options: LaunchOptions = field(default_factory=LaunchOptions)

    def files(self) -> dict[str, str]:
        """Rendered files, by name."""
        return RENDERERS[self.target](self.job())

    def job(self) -> ClusterJob:
        """Resolved run."""
        return resolve_job(Path(self.config), self.overrides, self.options)


_RECIPE = "configs/llama2_7b_trn1.toml"
_SIXTEEN = ("cluster.nodes=16", "parallel.dp=64", "run.dir=runs/7b")
_GPU = "configs/llama3_2_1b_cuda.toml"
_ON_P5 = ("cluster.instance=p5.48xlarge", "cluster.nodes=4")
_IN_S3 = ("checkpoint.mirror=s3://checkpoints/1b", "data.source=arrow", "data.path=s3://corpora/docs.arrow")
_IMAGE = "123456789012.dkr.ecr.us-east-1.amazonaws.com/nxtrain:0.1"

CASES = {
    "slurm": Case("slurm", _RECIPE, _SIXTEEN),
    "slurm_container": Case("slurm", _GPU, _ON_P5, LaunchOptions(image=_IMAGE, mounts="/fsx:/fsx")),
    "slurm_elastic": Case("slurm", _GPU, _ON_P5, LaunchOptions(min_nodes=2)),
    "kubernetes": Case("kubernetes", _RECIPE, _SIXTEEN, LaunchOptions(image=_IMAGE)),
    "kubernetes_elastic": Case("kubernetes", _GPU, _ON_P5, LaunchOptions(image=_IMAGE, min_nodes=2)),
    "hyperpod": Case("hyperpod", _RECIPE, _SIXTEEN, LaunchOptions(image=_IMAGE)),
    "sagemaker": Case(
        "sagemaker", _RECIPE, (*_SIXTEEN, "checkpoint.mirror=s3://bucket/7b"), LaunchOptions(image=_IMAGE)
    ),
    "parallelcluster_gpu": Case("parallelcluster", _GPU, (*_ON_P5, *_IN_S3), LaunchOptions(storage_gib=57_600)),
    "eks_gpu": Case("eks", _GPU, (*_ON_P5, *_IN_S3), LaunchOptions(storage_gib=57_600)),
}
"""Launches by the name of their folder."""

CLUSTERS = {"parallelcluster": "parallelcluster_trn1.yaml", "eks": "eks_trn1.yaml"}
"""Files of `configs/clusters` by target: the clusters of the published 7B run."""

LANES = ("neuron", "neuron-native", "gpu", "xla", "cpu")


def all_files() -> dict[Path, str]:
    """Every file that is kept, with its text."""
    result = {GOLDEN / name / file: text for name, case in CASES.items() for file, text in case.files().items()}
    result = {path: text for path, text in result.items() if path.name != "Dockerfile"}
    script = GOLDEN / "sagemaker/sagemaker_job.py"
    result[script.with_name(f"{script.name}.txt")] = result.pop(script)  # the tools of this tree would judge a program
    result |= {GOLDEN / "docker" / f"Dockerfile.{lane}": docker.render(lane) for lane in LANES}
    for target, name in CLUSTERS.items():
        result[ROOT / "configs/clusters" / name] = Case(target, _RECIPE).files()[f"{target}.yaml"]
    return {**result, ROOT / "scripts/train.sbatch": render_generic()}


if __name__ == "__main__":
    os.chdir(ROOT)
    for path, text in all_files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
