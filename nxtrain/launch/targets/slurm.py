"""Job script for Slurm: compile, run, save before the time limit, queue again, resume.

Source of the directives: https://slurm.schedmd.com/sbatch.html. HyperPod's `srun --auto-resume=1`:
https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-hyperpod-resiliency-slurm-auto-resume.html.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from nxtrain.launch.targets.job import Job

_SCRIPT = """\
#!/bin/bash
{directives}#SBATCH --ntasks-per-node=1 --exclusive --time=24:00:00 --requeue --open-mode=append --signal=B:USR1@120
# Trains under Slurm, on one node or many, and queues itself again until the run is done.
#
#   {usage}
#
# docs/slurm_kubernetes.md explains each line.
{arguments}first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
again=true
for step in {steps}; do
    srun {options} nxtrain $step "$@" cluster.nodes="$SLURM_JOB_NUM_NODES" --first-node "$first" & pid=$!
    trap 'kill -USR1 $pid' USR1    # the time limit is near
    trap again=false TERM          # Slurm has signalled all ranks, and decides itself on a requeue
    wait $pid; code=$?
    while kill -0 $pid 2>/dev/null; do wait $pid; code=$?; done    # a trap ends a wait early
    [ $code = 0 ] && $again || break
done
case $code in 1 | 7 | 75 | 137 | 138) $again && scontrol requeue "$SLURM_JOB_ID" ;; esac    # see docs/recovery.md
exit $code
"""

GENERIC = "sbatch --nodes=16 scripts/train.sbatch CONFIG [key=value ...]"
"""Use of the script that no run is written into."""


def render_generic() -> str:
    """Script for any run, which takes the configuration and the overrides from the command line of `sbatch`."""
    return _script("", GENERIC, "", "${NXTRAIN_STEPS:-launch}", "--wait=60")


def render(job: Job, *, auto_resume: bool = False) -> str:
    """Script for one run.

    Args:
        job: The run.
        auto_resume: Let HyperPod replace a broken node, and start the step again.
    """
    nodes = f"{job.min_nodes}-{job.nodes}" if job.is_elastic else f"{job.nodes}"
    directives = f"#SBATCH --job-name={job.name} --nodes={nodes}\n"
    arguments: Sequence[str] = (str(job.path), *job.overrides, f"--nproc={job.nproc}")
    options = "--wait=60 --auto-resume=1" if auto_resume else "--wait=60"
    return _script(directives, "sbatch train.sbatch", f"set -- {shlex.join(arguments)}\n", " ".join(job.steps), options)


def _script(directives: str, usage: str, arguments: str, steps: str, options: str) -> str:
    return _SCRIPT.format(directives=directives, usage=usage, arguments=arguments, steps=steps, options=options)
