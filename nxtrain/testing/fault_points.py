"""Where faults on purpose can be, and how `NXTRAIN_FAULTS` says so: `kind@rank:step:point[:argument...][,...]`.

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

from nxtrain.errors import ConfigError
from nxtrain.testing.fault_kinds import KINDS

VARIABLE = "NXTRAIN_FAULTS"
EXAMPLE = "kill@1:5:reduce or oserror@0:10:ckpt_write:ENOSPC:4096"


@dataclass(frozen=True)
class Place:
    """A function that is wrapped.

    Args:
        owner: `module` or `module:Class`.
        attribute: Its name there.
        when: Before it is called, after it has returned, or in the midst of the block that it writes.
    """

    owner: str
    attribute: str
    when: Literal["before", "after", "writing"] = "before"


POINTS = {
    "pre_step": Place("nxtrain.train.trainer", "train_step"),
    "fwd": Place("nxtrain.train.step", "_accumulate"),
    "bwd": Place("torch.autograd", "backward"),
    "reduce": Place("nxtrain.parallel.grads:Gradients", "reduce"),
    "opt": Place("nxtrain.optim.adamw:AdamW", "step"),
    "post_step": Place("nxtrain.train.trainer", "update", "after"),
    "ckpt_stage": Place("nxtrain.checkpoint.staging:Staging", "fill"),
    "ckpt_write": Place("nxtrain.io.checksummed_file:BlockWriter", "_transfer", "writing"),
    "ckpt_fsync": Place("nxtrain.io.checksummed_file:BlockWriter", "close"),
    "ckpt_commit": Place("nxtrain.checkpoint.save", "_commit"),
    "ckpt_rename": Place("nxtrain.checkpoint.directory", "publish"),
    "ckpt_latest": Place("nxtrain.checkpoint.directory", "point_to"),
    "load": Place("nxtrain.train.start", "restore"),
    "data": Place("nxtrain.data.loader:Loader", "batch"),
    "log": Place("nxtrain.metrics.sinks:JsonlSink", "log"),
}
"""Where a fault can be. A run loads before its first step, so that its step is 0 there."""

GRADIENTS = (
    Place("nxtrain.parallel.data_parallel:Bucketed", "_take"),
    Place("nxtrain.parallel.fully_sharded", "_local_grad"),
)
"""What gives this rank's gradient of a parameter: before it is averaged, but for torch's own sharding, after."""

LOSS = Place("nxtrain.train.step", "_sums")
"""What gives the loss of a micro-batch; the fault `bwd` strikes this figure alone, and `fwd` the gradients too."""


@dataclass(frozen=True)
class Fault:
    """One fault, as it was written.

    Args:
        kind: What happens.
        rank, step: Where and when; None: on all of them.
        point: At which function.
        arguments: Of the kind.
        after_bytes: With `ckpt_write`, how much is written first.
        repeats: Not only once.
        text: How it was written.
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
        """Whether it belongs to a rank and a step, or to one of those before so many."""
        return self.rank in {None, rank} and (self.step is None or self.step <= step < self.step + within)


def parse(text: str) -> list[Fault]:
    """Read the variable.

    Raises:
        ConfigError: It is malformed.
    """
    return [_parse(part.strip()) for part in text.split(",")]


def _parse(text: str) -> Fault:
    found = re.fullmatch(r"([a-z]+\d?)(!?)@(\d+|\*):(\d+|\*):([a-z_]+)((?::[^:]+)*)", text)
    if found is None:
        raise _wrong(text, "a fault is kind@rank:step:point, with arguments behind further colons")
    kind, repeats, rank, step, point, rest = found.groups()
    arguments = rest.split(":")[1:]
    if kind not in KINDS:
        raise _wrong(text, f"{kind} is none of the kinds {', '.join(KINDS)}")
    if point not in POINTS:
        raise _wrong(text, f"{point} is none of the points {', '.join(POINTS)}")
    known = KINDS[kind]
    if known.points and not any(re.fullmatch(allowed, point) for allowed in known.points):
        allowed = [name for name in POINTS if any(re.fullmatch(pattern, name) for pattern in known.points)]
        raise _wrong(text, f"{kind} is possible at {', '.join(allowed)}")
    after = 0
    if point == "ckpt_write" and arguments and arguments[-1].isdigit():
        after = int(arguments.pop())
    try:
        known.check(arguments)
    except ValueError as error:
        raise _wrong(text, f"{kind} takes {known.takes or 'no argument'}") from error
    on, at = (None if number == "*" else int(number) for number in (rank, step))
    return Fault(kind, on, at, point, tuple(arguments), after, bool(repeats), text)


def _wrong(text: str, rule: str) -> ConfigError:
    return ConfigError(
        f"{VARIABLE}: {text!r} is no fault: {rule}. For example {EXAMPLE}; faults are for tests, so unset "
        "the variable in a run that matters"
    )
