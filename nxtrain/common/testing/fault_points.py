"""Points of injected faults, and syntax of `NXTRAIN_FAULTS`: `kind@rank:step:point[:argument...][,...]`.

Examples:
    kill@1:5:reduce                rank 1 is killed as the gradients of step 5 are reduced
    nan@0:7:reduce                 a gradient of rank 0 is NaN in step 7
    kill@*:10:ckpt_write:4096      every rank is killed after writing 4096 bytes of the checkpoint of step 10
    oserror@0:*:log:ENOSPC         rank 0 finds the disk full whenever it logs
    spike@*:20:reduce:10:30        gradients are ten times as large in steps 20 to 49
    raise!@1:3:fwd                 rank 1 fails in step 3, however often it is started
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from nxtrain.common.errors import ConfigError
from nxtrain.common.testing.fault_kinds import KINDS

VARIABLE = "NXTRAIN_FAULTS"
EXAMPLE = "kill@1:5:reduce or oserror@0:10:ckpt_write:ENOSPC:4096"


@dataclass(frozen=True)
class PatchPoint:
    """Function that an injected fault wraps, at one point of a run.

    Args:
        owner: `module` or `module:Class` that has the function.
        attribute: Name of the function.
        when: Time of the fault: before the call, after the return, or in the middle of the written block.
    """

    owner: str
    attribute: str
    when: Literal["before", "after", "writing"] = "before"


POINTS = {
    "pre_step": PatchPoint("nxtrain.train.trainer", "train_step"),
    "fwd": PatchPoint("nxtrain.train.step", "_accumulate"),
    "bwd": PatchPoint("torch.autograd", "backward"),
    "reduce": PatchPoint("nxtrain.parallel.grads:Gradients", "reduce"),
    "opt": PatchPoint("nxtrain.optim.adamw:AdamW", "step"),
    "eval": PatchPoint("nxtrain.train.trainer", "eval_step"),
    "post_step": PatchPoint("nxtrain.train.trainer", "update", "after"),
    "ckpt_stage": PatchPoint("nxtrain.checkpoint.staging:Staging", "fill"),
    "ckpt_write": PatchPoint("nxtrain.common.io.checksummed_file:ChecksummedWriter", "_transfer", "writing"),
    "ckpt_fsync": PatchPoint("nxtrain.common.io.checksummed_file:ChecksummedWriter", "close"),
    "ckpt_commit": PatchPoint("nxtrain.checkpoint.save", "_commit"),
    "ckpt_rename": PatchPoint("nxtrain.checkpoint.directory", "publish"),
    "ckpt_latest": PatchPoint("nxtrain.checkpoint.directory", "point_to"),
    "load": PatchPoint("nxtrain.train.start", "restore"),
    "data": PatchPoint("nxtrain.data.loader:Loader", "batch"),
    "worker": PatchPoint("nxtrain.data.workers:Workers", "rows"),
    "log": PatchPoint("nxtrain.metrics.sinks:JsonlSink", "log"),
}
"""Functions that faults wrap, by the name of the fault point.

A run loads its checkpoint before its first step, so the step of point `load` is 0.
"""

GRADIENTS = (
    PatchPoint("nxtrain.parallel.data_parallel:Bucketed", "_take"),
    PatchPoint("nxtrain.parallel.fully_sharded", "_local_grad"),
)
"""Functions that return this rank's gradient of a parameter: before averaging, or after it with torch's sharding."""

LOSS = PatchPoint("nxtrain.train.step", "_sums")
"""Function that returns the loss of a micro-batch. `bwd` faults change its value only; `fwd` faults change gradients
too.
"""


@dataclass(frozen=True)
class Fault:
    """One injected fault, parsed from `NXTRAIN_FAULTS`.

    Args:
        rank, step: Rank and step of the fault; None for all ranks or all steps.
        after_bytes: With `ckpt_write`, number of bytes written before the fault.
        repeats: The fault fires again after a restart.
    """

    kind: str
    rank: int | None
    step: int | None
    point: str
    arguments: tuple[str, ...] = ()
    after_bytes: int = 0
    repeats: bool = False
    text: str = ""

    def is_due(self, rank: int, step: int, *, within: int = 1) -> bool:
        """True if the fault applies to this rank, and its step is among the last `within` steps up to `step`."""
        return self.rank in {None, rank} and (self.step is None or self.step <= step < self.step + within)


def parse(text: str) -> list[Fault]:
    """Parse the value of the environment variable `NXTRAIN_FAULTS`.

    Raises:
        ConfigError: The text is not a list of faults.
    """
    return [_parse(part.strip()) for part in text.split(",")]


def _parse(text: str) -> Fault:
    match = re.fullmatch(r"([a-z]+\d?)(!?)@(\d+|\*):(\d+|\*):([a-z_]+)((?::[^:]+)*)", text)
    if match is None:
        raise _wrong(text, "a fault is kind@rank:step:point, with arguments after further colons")
    kind, repeats, rank, step, point, rest = match.groups()
    arguments = rest.split(":")[1:]
    if kind not in KINDS:
        raise _wrong(text, f"{kind} is none of the kinds {', '.join(KINDS)}")
    if point not in POINTS:
        raise _wrong(text, f"{point} is none of the points {', '.join(POINTS)}")
    allowed = KINDS[kind]
    points = [name for name in POINTS if re.fullmatch("|".join(allowed.points), name)]
    if allowed.points and point not in points:
        raise _wrong(text, f"{kind} is possible at {', '.join(points)}")
    after = 0
    if point == "ckpt_write" and arguments and arguments[-1].isdigit():
        after = int(arguments.pop())
    if not re.fullmatch(allowed.pattern, ":".join(arguments)):
        raise _wrong(text, f"{kind} takes {allowed.takes}")
    on, at = (None if number == "*" else int(number) for number in (rank, step))
    return Fault(kind, on, at, point, tuple(arguments), after, bool(repeats), text)


def _wrong(text: str, rule: str) -> ConfigError:
    return ConfigError(
        f"{VARIABLE}: {text!r} is not a fault: {rule}. For example {EXAMPLE}; faults are for tests, so unset "
        "the variable in a run that matters"
    )
