"""Command `nxtrain launch`, which starts a run on this machine, or writes the files that start a run on a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer

from nxtrain.cli.options import ConfigPath, FirstNode, Overrides, bounded, integer
from nxtrain.common.errors import ConfigError, Problem
from nxtrain.common.io.paths import local_path
from nxtrain.config.bounds import MAX_RANKS

APPLY = {
    "--first-node": ("local",),
    "--out": ("slurm", "kubernetes", "hyperpod", "sagemaker", "parallelcluster", "eks"),
    "--image": ("slurm", "kubernetes", "hyperpod", "sagemaker"),
    "--mounts": ("slurm", "hyperpod"),
    "--storage": ("parallelcluster", "eks"),
}
"""Values of --target for which each option has an effect."""

EPILOG = "Example: nxtrain launch configs/demo.toml --nproc 2 run.dir=runs/mine"


PER_GPU = 0
"""Number that stands for `--nproc gpu`, one rank per visible GPU."""


def _num_ranks(text: str | int) -> int:
    if text == "gpu":
        return PER_GPU
    try:
        return int(bounded(int, 1, MAX_RANKS)(str(text)))
    except typer.BadParameter as error:
        raise typer.BadParameter(f"{error}; give a number, or gpu") from error


def launch(
    config: ConfigPath,
    overrides: Overrides = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            metavar="N|gpu",
            help="Ranks per machine, gpu: one per visible GPU; by default tp x cp x pp x dp / nodes.",
            parser=_num_ranks,
        ),
    ] = None,
    first_node: FirstNode = "",
    min_nodes: Annotated[
        int | None, integer(1, MAX_RANKS, help="Go on with so few machines if others are lost; by default with all.")
    ] = None,
    target: Annotated[
        Literal["local", "slurm", "kubernetes", "hyperpod", "sagemaker", "parallelcluster", "eks"],
        typer.Option(help="This machine, or a kind of cluster."),
    ] = "local",
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="With a cluster, write its files.", parser=local_path, show_default=False),
    ] = None,
    image: Annotated[str, typer.Option(metavar="NAME", help="With a cluster, the container image.")] = "",
    mounts: Annotated[
        str, typer.Option(metavar="SRC:DST[,...]", help="With Slurm and --image, folders that its containers get.")
    ] = "",
    claim: Annotated[
        str, typer.Option(metavar="NAME", help="With Kubernetes, the volume claim of the shared file system.")
    ] = "fsx-claim",
    storage: Annotated[
        int | None,
        integer(1200, 4_800_000, help="With parallelcluster and eks, GiB of the shared file system; by default 4800."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print environment and command, or the files; start nothing.")
    ] = False,
) -> None:
    """Start all ranks of a run on this machine, with the environment variables that the devices need.

    With several machines, run this command on all of them with the same arguments, by srun or pdsh. For a cluster,
    --target renders the files that start the run there: --out writes them, and --dry-run prints them. With neither,
    --target slurm submits its script with sbatch.
    """
    is_given = {"--out": out is not None, "--image": bool(image), "--first-node": bool(first_node)}
    _check_options(target, nproc, {**is_given, "--mounts": bool(mounts), "--storage": storage is not None})
    if target == "local":
        from nxtrain.launch.local import launch

        if nproc == PER_GPU:
            from nxtrain.backends import num_gpus

            nproc = num_gpus()
        launch(config, overrides or [], nproc, dry_run, first_node, min_nodes or 0)
        return
    from nxtrain.launch.targets.job import LaunchOptions
    from nxtrain.launch.targets.render import launch_on
    from nxtrain.launch.targets.storage import STORAGE_GIB

    options = LaunchOptions(
        nproc=nproc,
        image=image,
        claim=claim,
        min_nodes=min_nodes or 0,
        mounts=mounts,
        storage_gib=storage or STORAGE_GIB,
    )
    launch_on(target, config, overrides or [], options, out=out, dry_run=dry_run)


def _check_options(target: str, nproc: int | None, is_given: Mapping[str, bool]) -> None:
    """Raise an error for options that have no effect with a target, such as `--out` without --target.

    Raises:
        ConfigError: An option is for other targets.
    """
    problems = []
    if nproc == PER_GPU and target != "local":
        hint = "leave it out to take all devices of cluster.instance, or give a number"
        problems.append(Problem("", f"--nproc gpu counts GPUs of this machine, not of --target {target}", hint=hint))
    for option, given in is_given.items():
        if given and target not in APPLY[option]:
            targets = " or ".join(APPLY[option])
            hint = f"leave it out, or use --target {targets}"
            problems.append(Problem("", f"{option} has no effect with --target {target}", hint=hint))
    if problems:
        raise ConfigError(problems)
