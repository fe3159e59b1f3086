"""Settings of torch's profiler for TorchNeuron: runtime and device events in files for Neuron Explorer.

Sources: tools/neuron-explorer/how-to-profile-pytorch.html (modes) and environment-variables.html in
https://awsdocs-neuron.readthedocs-hosted.com/en/latest, of SDK 2.33.1. tools/neuron-explorer/
how-to-profile-workload.rst (parameters of `NeuronConfig`) in https://github.com/aws-neuron/aws-neuron-sdk at 81ce03a.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity

from nxtrain.common.run_folder import DEVICE_PROFILES_DIR

DEVICE_TRACE = "NEURON_RT_INSPECT_DEVICE_PROFILE"
"""Environment variable of the Neuron runtime that enables instruction traces, unless its value is 0."""


def native_profiler(profiles: Path, environ: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """Arguments with which torch's profiler also records the device, and a log message about the device's files.

    Instruction traces reserve gigabytes of device memory, so a run that otherwise fits may fail. They are off unless
    the environment enables them.

    Args:
        profiles: Folder of the run's profiles.
        environ: Environment variables of this process.
    """
    activities = {"activities": [ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]}
    try:
        from torch_neuronx.profiling import NeuronConfig, ProfileMode
    except ImportError:
        return activities, "this TorchNeuron has no NeuronConfig, so the profile has no files for Neuron Explorer"
    instructions = environ.get(DEVICE_TRACE, "0") != "0"
    modes = [ProfileMode.RUNTIME, *([ProfileMode.DEVICE] if instructions else [])]
    folder = profiles / DEVICE_PROFILES_DIR
    try:
        config = NeuronConfig(modes=modes, profile_output_dir=str(folder))
    except TypeError as error:
        return activities, f"this TorchNeuron's NeuronConfig is not the one that AWS documents: {error}"
    # Without NeuronConfig's exporter, since torch saves a trace only once, and the run saves its own file.
    hint = "" if instructions else f"; {DEVICE_TRACE}=1 adds instructions, and takes about 5 GB of device memory"
    return {**activities, "experimental_config": config}, f"events of the device: {folder}, for Neuron Explorer{hint}"
