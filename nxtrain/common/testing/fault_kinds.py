"""Kinds of injected faults, and their effects on a process; see `nxtrain.common.testing.faults`."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

LONG_S = 10**6
PAGE_BYTES = 4096
VALUES = ("nan", "inf", "spike")
"""Kinds of faults that change numbers of a step, after which the step continues."""
_SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "term": signal.SIGTERM,
    "usr1": signal.SIGUSR1,
    "int": signal.SIGINT,
}
_WORKER_SIGNALS = {"killworker": signal.SIGKILL, "stopworker": signal.SIGSTOP}


class InjectedError(RuntimeError):
    """Error raised by an injected fault."""


@dataclass(frozen=True)
class Kind:
    """A kind of injected fault: its arguments, and the points where it is possible.

    Args:
        takes: Description of the arguments, for error messages.
        pattern: Regular expression of the arguments, joined by colons.
        points: Regular expressions of the points where the kind is possible; empty for all points.
    """

    takes: str = "no argument"
    pattern: str = ""
    points: tuple[str, ...] = ()


_OF_WORKER = Kind("the number of a worker, by default 0", r"\d*", ("worker",))
_OF_GRADIENTS = Kind(points=("fwd", "bwd", "reduce"))
_ERROR_NAMES = "|".join(errno.errorcode.values())

KINDS = {
    **dict.fromkeys(("kill", "stop", "segv", "exit", "raise", "hang", "gil", "term", "usr1", "int", "oom"), Kind()),
    "sleep": Kind("the seconds to lose in every step from then on", r"\d+(\.\d*)?|\.\d+"),
    "nan": _OF_GRADIENTS,
    "inf": _OF_GRADIENTS,
    "spike": Kind("a factor and a number of steps, by default 10:1", r"(\d+(\.\d*)?(:\d+)?)?", ("reduce",)),
    "flip": Kind("the name of a parameter, by default the first", r"[^:]*", ("pre_step", "post_step")),
    "oserror": Kind("the name of an error, by default ENOSPC", f"({_ERROR_NAMES})?", ("ckpt_.*", "log")),
    "killworker": _OF_WORKER,
    "stopworker": _OF_WORKER,
}
"""Kinds of faults by name."""


def spike_of(arguments: Sequence[str]) -> tuple[float, int]:
    """Factor and number of steps of a spike fault; by default a factor of 10 for one step."""
    factor, steps = (*arguments, *("10", "1")[len(arguments) :])
    return float(factor), int(steps)


def act(kind: str, arguments: Sequence[str], args: Sequence[Any]) -> None:
    """Inject a fault of any kind outside `VALUES`.

    Args:
        kind: Kind of the fault.
        arguments: Arguments of the fault.
        args: Arguments of the function at the fault point.
    """
    if kind in _SIGNALS:
        os.kill(os.getpid(), _SIGNALS[kind])
    elif kind in _WORKER_SIGNALS:
        members = args[0].members
        number = int("".join(arguments) or "0")
        members[number % len(members)].signal(_WORKER_SIGNALS[kind])
    elif kind == "segv":
        ctypes.string_at(0)
    elif kind == "exit":
        os._exit(1)
    elif kind == "raise":
        raise InjectedError("injected failure")
    elif kind == "oom":
        raise MemoryError("injected")
    elif kind == "oserror":
        error = getattr(errno, "".join(arguments) or "ENOSPC")
        raise OSError(error, os.strerror(error), "injected")
    elif kind == "sleep":
        time.sleep(float(arguments[0]))
    elif kind == "flip":
        flip(args[0].model, *arguments)
    else:
        _hang(holds_gil=kind == "gil")


def _hang(*, holds_gil: bool) -> NoReturn:
    sleep = time.sleep
    if holds_gil:
        sleep = ctypes.PyDLL(None).sleep
    while True:
        sleep(LONG_S)


def altered(x: Tensor, factor: float = 1.0, first: float | None = None) -> Tensor:
    """Copy of a tensor times `factor`, with its first entry replaced by `first` unless `first` is None.

    The numbers are uploaded as a tensor. On a lazy device, a step with a fault then has the same graph as any other.
    """
    replaces = 0.0 if first is None else 1.0
    numbers = torch.tensor([factor, replaces, first or 0.0]).to(x.device)
    flat = x.detach().reshape(-1) * numbers[0]
    return torch.cat([torch.where(numbers[1] > 0, numbers[2], flat[:1]), flat[1:]]).view(x.shape)


@torch.no_grad()
def flip(model: torch.nn.Module, name: str = "") -> None:
    """Flip the lowest bit of the first entry of a parameter that this rank holds."""
    for parameter_name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()
        if local.numel() and name in {"", parameter_name}:
            whole = local.cpu().clone()  # on lazy devices a write into a part would make the next step another graph
            bits = whole.view(-1)[:1].view(torch.uint8)
            bits[0] ^= 1
            local.copy_(whole.to(local.device))
            return
    raise InjectedError(f"this rank holds no entry of a parameter {name!r}")


def write_part(writer: Any, block: Any, where: int, length: int) -> None:
    """Write only the first pages of a block, rounded up from `length`, as the writer of a checkpoint would.

    The written bytes survive the end of the process.
    """
    pages = -(-length // PAGE_BYTES) * PAGE_BYTES
    with memoryview(block) as view:
        os.pwrite(writer._file, view[:pages], where)
