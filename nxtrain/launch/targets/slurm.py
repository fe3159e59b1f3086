"""Slurm job script, which compiles graphs, trains, saves before the time limit, requeues itself and resumes.

Source of the directives: https://slurm.schedmd.com/sbatch.html. HyperPod's `srun --auto-resume=1`:
https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-hyperpod-resiliency-slurm-auto-resume.html. Containers of
Enroot by Pyxis: https://github.com/NVIDIA/pyxis/wiki/Usage.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from nxtrain.common.machines import NEURON
from nxtrain.launch.exit_codes import SHELL_FUNCTION
from nxtrain.launch.targets.job import ClusterJob, check_run_folder

_SCRIPT = """\
#!/bin/bash
{directives}#SBATCH --ntasks-per-node=1 --exclusive --time=24:00:00 --requeue --open-mode=append --signal=B:USR1@120
# Trains under Slurm, on one node or many, and queues itself again until the run is done.
#
#   {usage}
#
# docs/slurm_kubernetes.md explains each line.
{arguments}{function}first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
again=true
{prepare}for step in {steps}; do
    [ $step = compile ] && after=0 || after=60    # seconds for other nodes once one has ended; compilers need hours
    srun --wait=$after{options} nxtrain $step "$@" cluster.nodes="$SLURM_JOB_NUM_NODES" --first-node "$first" & pid=$!
    trap 'kill -USR1 $pid' USR1    # the time limit is near
    trap again=false TERM          # Slurm has signalled all ranks, and decides itself on a requeue
    wait $pid; code=$?
    while kill -0 $pid 2>/dev/null; do wait $pid; code=$?; done    # a trap ends a wait early
    [ $code = 0 ] && $again || break
done
is_worth_restart $code && $again && scontrol requeue "$SLURM_JOB_ID"
exit $code
"""

GENERIC = "sbatch --nodes=16 scripts/train.sbatch CONFIG [key=value ...]"
"""Usage of the generic script, which takes any configuration."""


def render_generic() -> str:
    """Render the generic Slurm script, which takes configuration and overrides from the command line of `sbatch`."""
    return _script("", GENERIC, "", "${NXTRAIN_STEPS:-launch}", "")


def render(job: ClusterJob, *, auto_resume: bool = False) -> str:
    """Render the Slurm script of one run.

    Args:
        job: Resolved run.
        auto_resume: Let HyperPod replace a broken node, and restart the job step.

    Raises:
        ConfigError: Containers do not have the folder of the run.
    """
    nodes = f"{job.nodes}"
    if job.is_elastic:
        nodes = f"{job.min_nodes}-{job.nodes}"
    directives = f"#SBATCH --job-name={job.name} --nodes={nodes} --output={job.name}-%j.log\n"
    arguments: Sequence[str] = (str(job.path), *job.overrides, f"--nproc={job.nproc}")
    options = prepare = ""
    if auto_resume:
        options += " --auto-resume=1"
    if job.options.image:
        mounted = [mount.split(":")[1] for mount in filter(None, job.options.mounts.split(","))]
        here = Path.cwd()
        parent = Path(os.path.normpath(here / job.config.run.dir)).parent
        check_run_folder(job, here, [here, *mounted], f"mount it, as --mounts {parent}:{parent}")
        graphs = graph_folder(job)
        if graphs:
            prepare = f"srun mkdir -p {graphs} || exit    # graphs outlive the containers\n"
        options += f" {container_options(job.options.image, container_mounts(job))}"
    arguments_line = f"set -- {shlex.join(arguments)}\n"
    return _script(directives, "sbatch train.sbatch", arguments_line, " ".join(job.steps), options, prepare)


def graph_folder(job: ClusterJob) -> str:
    """Folder of compiled graphs on the disk of a node, which containers get; empty if there is none."""
    folder = str(job.config.compile.cache_dir)
    is_mountable = re.fullmatch(r"/[\w./-]+", folder, re.ASCII) is not None
    return folder if job.machine.resource == NEURON and is_mountable else ""


def container_mounts(job: ClusterJob) -> str:
    """Mounts of a run's containers other than the working directory, in Pyxis' format; empty for none."""
    mounts = []
    if job.options.mounts:
        mounts.append(job.options.mounts)
    graphs = graph_folder(job)
    if graphs:
        mounts.append(f"{graphs}:{graphs}")
    return ",".join(mounts)


def container_options(image: str, mounts: str) -> str:
    """Options of srun, as shell text, that run tasks in a container with the job's working directory.

    Args:
        image: Container image.
        mounts: More mounts, `SRC:DST[,SRC:DST...]`; empty for none.
    """
    more = ""
    if mounts:
        more = f",{shlex.quote(mounts)}"
    uri = shlex.quote(f"--container-image={enroot_uri(image)}")
    return f'{uri} --container-mounts="$PWD:$PWD"{more} --container-workdir="$PWD"'


def enroot_uri(image: str) -> str:
    """Convert the name of an image to Enroot's format, which has `#` instead of `/` after the registry.

    As in Docker, the first part of a name is a registry if it has a dot or a port.

    Source: https://github.com/NVIDIA/enroot/blob/master/doc/cmd/import.md.
    """
    registry, slash, rest = image.partition("/")
    is_registry = re.fullmatch(r"localhost|[\w-]+(\.[\w-]+)+(:\d+)?|[\w-]+:\d+", registry) is not None
    if slash and is_registry:
        return f"{registry}#{rest}"
    return image


def _script(directives: str, usage: str, arguments: str, steps: str, options: str, prepare: str = "") -> str:
    return _SCRIPT.format(
        directives=directives,
        usage=usage,
        arguments=arguments,
        function=SHELL_FUNCTION,
        prepare=prepare,
        steps=steps,
        options=options,
    )
