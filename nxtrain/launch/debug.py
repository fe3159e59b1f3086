"""Debug logs of communication for `recovery.debug=dist`: environment variables of libraries, and a log file per rank.

Without debugging, a run has no extra cost. With debugging, each collective of torch first waits for all its ranks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from nxtrain.common.run_folder import DEBUG_DIR, LOGS_DIR
from nxtrain.config.schema import RunConfig
from nxtrain.launch.environment import Variable, with_shell_values

_TORCH = "https://docs.pytorch.org/docs/2.9/distributed.html#debugging-torch-distributed-applications"
_STACKS = "https://docs.pytorch.org/docs/2.9/debugging_environment_variables.html"
_GLOO = "https://github.com/pytorch/gloo/blob/509e623/gloo/common/logging.cc"
_NCCL = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
_NEURON = "https://awsdocs-neuron.readthedocs-hosted.com/en/latest/neuron-runtime/guides/configuration-guide.html"
_TORCHRUN = "torch 2.9, torch/distributed/run.py"


def debug_folder(config: RunConfig) -> Path:
    """Folder of a run's debug logs of communication."""
    return config.run.dir / LOGS_DIR / DEBUG_DIR


def debug_variables(config: RunConfig, environ: Mapping[str, str], *, neuron: bool) -> tuple[Variable, ...]:
    """Environment variables for a rank's debug logs, where values of the shell win; empty without `recovery.debug`."""
    if config.recovery.debug == "off":
        return ()
    variables = [
        Variable(
            "TORCH_DISTRIBUTED_DEBUG",
            "DETAIL",
            "recovery.debug=dist: before each collective, a monitored barrier names missing ranks, and "
            "ranks with different collectives raise an error",
            _TORCH,
        ),
        Variable("TORCH_SHOW_CPP_STACKTRACES", "1", "an error of torch's C++ has the stack of the call", _STACKS),
        Variable(
            "TORCH_DISABLE_ADDR2LINE",
            "1",
            "addr2line takes seconds to minutes for torch's libraries, while other ranks wait for the error",
            _STACKS,
        ),
        Variable("TORCH_CPP_LOG_LEVEL", "INFO", "lines of torch's process groups are of this level", _TORCH),
        Variable("GLOO_LOG_LEVEL", "INFO", "connections of gloo; torch 2.9 has a gloo without this variable", _GLOO),
        Variable("NCCL_DEBUG", "INFO", "connections and transports of NCCL, and of Neuron's collectives", _NCCL),
        Variable(
            "NCCL_DEBUG_FILE",
            str(debug_folder(config) / "nccl-%h-%p.txt"),
            "a file of each rank, by host and process; its lines have the rank",
            _NCCL,
        ),
    ]
    if neuron:
        variables += [
            Variable("NEURON_RT_LOG_LEVEL", "INFO", "work of the Neuron runtime", _NEURON),
            Variable(
                "NEURON_RT_LOG_LOCATION",
                "console",
                "among the rank's other lines; the runtime writes no file, only this or syslog",
                _NEURON,
            ),
        ]
    return with_shell_values(variables, environ)


def agent_settings(config: RunConfig, environ: Mapping[str, str]) -> tuple[tuple[str, ...], tuple[Variable, ...]]:
    """Options and variables of an agent that also writes each rank's output to a file; empty without debugging."""
    if config.recovery.debug == "off":
        return (), ()
    prefix = Variable(
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[rank ${rank}] ", "a line on the terminal has its rank", _TORCHRUN
    )
    return (f"--log-dir={debug_folder(config)}", "--tee=3"), with_shell_values([prefix], environ)


def open_debug_folder(config: RunConfig, *, is_alone: bool) -> str:
    """Create the folder of debug logs, which NCCL does not create, and return a log line; empty without debugging.

    The line names the log file of each rank, or the reason why ranks have no log files. An agent must redirect standard
    error before the rank starts; later it cannot be split by rank.

    Args:
        config: Configuration of the run.
        is_alone: The run has one rank.
    """
    folder = debug_folder(config)
    if config.recovery.debug == "off":
        return ""
    with suppress(OSError):  # the run reports a folder that cannot be written
        folder.mkdir(parents=True, exist_ok=True)
    if is_alone:
        return "recovery.debug=dist: a lone rank communicates with no other; its device's lines are on standard error"
    mine = os.fstat(2)
    is_of_agent = False  # True if standard error is a file that an agent opened in the folder
    with suppress(OSError):
        is_of_agent = any(os.path.samestat(mine, file.stat()) for file in folder.glob("*/attempt_*/*/stderr.log"))
    if is_of_agent:
        return f"recovery.debug=dist: the lines of each rank are in {folder}/*/attempt_*/LOCAL_RANK/stderr.log"
    return (
        "recovery.debug=dist: the lines of all ranks share one standard error, which was open before they started. "
        f"For a file of each rank use nxtrain launch, or torchrun --log-dir={folder} --tee=3"
    )
