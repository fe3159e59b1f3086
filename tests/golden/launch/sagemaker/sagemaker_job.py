"""Starts a SageMaker training job of nxtrain; written by nxtrain launch.

    pip install 'sagemaker>=2.240,<3'
    export ROLE=arn:aws:iam::ACCOUNT:role/NAME IMAGE=ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME BUCKET=NAME
    python sagemaker_job.py
"""

import os
import pathlib

from sagemaker.estimator import Estimator
from sagemaker.s3 import S3Uploader

folder = f"s3://{os.environ['BUCKET']}/llama2-7b-trn1"
config = S3Uploader.upload(str(pathlib.Path(__file__).with_name('run.toml')), f"{folder}/config")
estimator = Estimator(
    image_uri=os.environ.get("IMAGE", '123456789012.dkr.ecr.us-east-1.amazonaws.com/nxtrain:0.1'),
    role=os.environ["ROLE"],
    instance_type='ml.trn1.32xlarge',
    instance_count=16,
    base_job_name='llama2-7b-trn1',
    container_entry_point=["bash", "-c", 'nxtrain compile "$@" && exec nxtrain launch "$@"', "nxtrain"],
    container_arguments=['/opt/ml/input/data/config/run.toml', '--nproc=32', '--first-node=algo-1:29500', 'run.dir=/opt/ml/checkpoints/llama2-7b-trn1', 'compile.cache_dir=/tmp/neuron-compile-cache'],
    # Copied to S3 while the job runs, and back when it starts again.
    checkpoint_local_path="/opt/ml/checkpoints",
    checkpoint_s3_uri=f"{folder}/checkpoints",
    output_path=f"{folder}/output",
    max_run=5 * 86400,
    max_retry_attempts=30,
    volume_size=512,
    disable_profiler=True,
)
estimator.fit({"config": config}, wait=False)
print(estimator.latest_training_job.name)
