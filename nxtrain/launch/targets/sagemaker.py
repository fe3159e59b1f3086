"""Python script with the estimator call that starts a run as a SageMaker training job.

Sources: https://sagemaker.readthedocs.io/en/v2/api/training/estimators.html (release 2 of the package),
https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-training-algo-running-container.html (hosts are named
algo-1, algo-2, ...; SIGTERM comes 120 seconds before SIGKILL).
"""

from __future__ import annotations

from nxtrain.common.errors import ConfigError, Problem
from nxtrain.common.io.paths import is_bucket
from nxtrain.launch.targets.job import CONFIG_FILE, ClusterJob

FOLDER = "/opt/ml/input/data/config"
"""Folder of the SageMaker input channel `config` in containers."""

_SCRIPT = '''\
"""Starts a SageMaker training job of nxtrain; written by nxtrain launch.

    pip install 'sagemaker>=2.240,<3'
    export ROLE=arn:aws:iam::ACCOUNT:role/NAME IMAGE=ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME BUCKET=NAME
    python sagemaker_job.py
"""

import os
import pathlib

from sagemaker.estimator import Estimator
from sagemaker.s3 import S3Uploader

folder = f"s3://{{os.environ['BUCKET']}}/{name}"
config = S3Uploader.upload(str(pathlib.Path(__file__).with_name({file!r})), f"{{folder}}/config")
estimator = Estimator(
    image_uri=os.environ.get("IMAGE", {image!r}),
    role=os.environ["ROLE"],
    instance_type={instance!r},
    instance_count={nodes},
    base_job_name={name!r},
    container_entry_point=["bash", "-c", {entry!r}, "nxtrain"],
    container_arguments={arguments!r},
    # Copied to S3 while the job runs, and back when it starts again.
    checkpoint_local_path="/opt/ml/checkpoints",
    checkpoint_s3_uri=f"{{folder}}/checkpoints",
    output_path=f"{{folder}}/output",
    max_run=5 * 86400,
    max_retry_attempts=30,
    volume_size=512,
    disable_profiler=True,
)
estimator.fit({{"config": config}}, wait=False)
print(estimator.latest_training_job.name)
'''


def render(job: ClusterJob) -> dict[str, str]:
    """Render the Python script that starts a SageMaker job, and the run's configuration, by file name.

    Raises:
        ConfigError: The run has several machines, which share no file system, but no mirror in a bucket.
    """
    mirror = job.config.checkpoint.mirror
    if job.nodes > 1 and not is_bucket(mirror):
        given = "not set"
        if mirror:
            given = f"{mirror} is a folder"
        reason = f"{given}, but the machines of a SageMaker job share no file system"
        raise ConfigError([Problem("checkpoint.mirror", reason, hint="use checkpoint.mirror=s3://BUCKET/PREFIX")])
    script = "".join(f'nxtrain {step} "$@" && ' for step in job.steps[:-1]) + f'exec nxtrain {job.steps[-1]} "$@"'
    arguments = [*job.arguments(f"{FOLDER}/{CONFIG_FILE}", "algo-1"), f"run.dir=/opt/ml/checkpoints/{job.name}"]
    if "compile" in job.steps:
        arguments.append("compile.cache_dir=/tmp/neuron-compile-cache")
    text = _SCRIPT.format(
        name=job.name,
        file=CONFIG_FILE,
        image=job.image,
        instance=f"ml.{job.machine.name or 'm5.xlarge'}",
        nodes=job.nodes,
        entry=script,
        arguments=arguments,
    )
    return {"sagemaker_job.py": text, CONFIG_FILE: job.config_text}
