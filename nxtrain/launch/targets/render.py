"""Rendering of a run's job files for `nxtrain launch --target NAME`: write, print, or submit them to Slurm."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from nxtrain.common.errors import BackendError, ConfigError
from nxtrain.common.io.atomic import replace_text
from nxtrain.launch.local import fewer_nodes
from nxtrain.launch.targets import clusters, docker, kubernetes, sagemaker, slurm
from nxtrain.launch.targets.job import CONFIG_FILE, SHARED, ClusterJob, LaunchOptions, lost_run_folder, resolve_job

SCRIPT = "train.sbatch"
"""Name of the Slurm job script."""


RENDERERS: Mapping[str, Callable[[ClusterJob], dict[str, str]]] = {
    "slurm": lambda job: {SCRIPT: slurm.render(job)},
    "kubernetes": lambda job: {**kubernetes.render(job), **_image(job)},
    "hyperpod": lambda job: {
        SCRIPT: slurm.render(job, auto_resume=True),
        **kubernetes.render_hyperpod(job),
        **_image(job),
    },
    "sagemaker": lambda job: {**sagemaker.render(job), **_image(job)},
    "parallelcluster": lambda job: {"parallelcluster.yaml": clusters.render_parallelcluster(job)},
    "eks": clusters.render_eks,
}
"""Functions that render the job files of each target, as texts by file name."""


NAMES = (
    *(SCRIPT, "pytorchjob.yaml", "mpijob.yaml", "jobset.yaml", "sagemaker_job.py", CONFIG_FILE),
    *("parallelcluster.yaml", "eks.yaml", "fsx-static.yaml", "fsx-dynamic.yaml", "efs.yaml", "Dockerfile"),
)
"""Names of all job files that `RENDERERS` can write."""


def launch_on(
    target: str, path: Path, overrides: Sequence[str], options: LaunchOptions, *, out: Path | None, dry_run: bool
) -> None:
    """Write or print the job files of a run on a cluster; with neither, submit the Slurm script.

    Args:
        target: Key of `RENDERERS`.
        path: Configuration file.
        overrides: Values that win over the file's.
        options: Launch options.
        out: Folder for the files; None to write no files.
        dry_run: Print the files only.

    Raises:
        ConfigError: The run is invalid for the target, or the target has no command for submission.
        BackendError: Slurm is missing, or refuses the job.
    """
    job = resolve_job(path, overrides, options)
    files = RENDERERS[target](job)
    if target == "hyperpod":
        _warn_of_pods(job)
    for warning in fewer_nodes(job.loaded, job.nproc, options.min_nodes):
        print(warning, file=sys.stderr)
    if dry_run:
        print(shown(files), end="")
    elif out is not None:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            file = out / name
            if file.is_file() and file.read_bytes() != text.encode():  # of another launch, or edited by a user
                print(f"{file} was another file, and is replaced", file=sys.stderr)
            replace_text(file, text, durable=False)
            print(file)
        left = [name for name in NAMES if name not in files and (out / name).exists()]
        if left:
            print(f"{out} also has {', '.join(left)} of another launch; delete what is not meant", file=sys.stderr)
    elif target == "slurm":
        sbatch = shutil.which("sbatch")
        if sbatch is None:
            hint = "start this on a node of the cluster, or use --out DIR to write the script"
            raise BackendError(f"sbatch, a program of Slurm, is not on PATH; {hint}")
        done = subprocess.run([sbatch], input=files[SCRIPT].encode(), check=False)
        if done.returncode:
            raise BackendError(f"sbatch ended with {done.returncode}; the lines above say why")
    else:
        raise ConfigError(
            f"--target {target} cannot submit a job: use --out DIR to write its files, or --dry-run to print them"
        )


def shown(files: Mapping[str, str]) -> str:
    """Concatenate files to one text, each below a line with its name."""
    return "\n".join(f"# ===== {name}\n{text}" for name, text in files.items())


def _image(job: ClusterJob) -> dict[str, str]:
    return {"Dockerfile": docker.render(job.lane)}


def _warn_of_pods(job: ClusterJob) -> None:
    """Warn about pods of HyperPod that would lose the run's folder; Slurm on HyperPod has no such pods."""
    reason = lost_run_folder(job, SHARED, [SHARED])
    if reason:
        print(f"warning: pytorchjob.yaml: run.dir={reason}; {kubernetes.WAY_OUT}", file=sys.stderr)
