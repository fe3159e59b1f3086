"""Kinds of injected faults and their effects on a process; see `nxtrain.common.testing.faults`."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

LONG_S = 10**6
PAGE_BYTES = 4096
VALUES = ("nan", "inf", "spike")
"""Kinds that change numbers of a step, after which the step goes on."""
_WORKER_SIGNALS = {"killworker": signal.SIGKILL, "stopworker": signal.SIGSTOP}


class InjectedError(RuntimeError):
    """Error of an injected fault."""


def _nothing(arguments: Sequence[str]) -> None:
    if arguments:
        raise ValueError


def _seconds(arguments: Sequence[str]) -> None:
    (seconds,) = arguments
    if float(seconds) < 0:
        raise ValueError


def _error_name(arguments: Sequence[str]) -> None:
    if arguments and (len(arguments) > 1 or not hasattr(errno, arguments[0])):
        raise ValueError


def _one_at_most(arguments: Sequence[str]) -> None:
    if len(arguments) > 1:
        raise ValueError


def _number(arguments: Sequence[str]) -> None:
    (number,) = arguments or ("0",)
    if int(number) < 0:
        raise ValueError


def spike_of(arguments: Sequence[str]) -> tuple[float, int]:
    """Factor and number of steps of a spike; by default ten times, for one step."""
    factor, steps = (*arguments, *("10", "1")[len(arguments) :])
    return float(factor), int(steps)


@dataclass(frozen=True)
class Kind:
    """Arguments and possible points of a kind of fault.

    Args:
        takes: Description of the arguments, for messages.
        check: Raises a ValueError for wrong arguments.
        points: Patterns of the points where the kind is possible; empty: everywhere.
    """

    takes: str = ""
    check: Callable[[Sequence[str]], object] = _nothing
    points: tuple[str, ...] = ()


KINDS = {
    "kill": Kind(),
    "stop": Kind(),
    "segv": Kind(),
    "exit": Kind(),
    "raise": Kind(),
    "hang": Kind(),
    "sleep": Kind("the seconds to lose in every step from then on", _seconds),
    "gil": Kind(),
    "term": Kind(),
    "usr1": Kind(),
    "int": Kind(),
    "nan": Kind(points=("fwd", "bwd", "reduce")),
    "inf": Kind(points=("fwd", "bwd", "reduce")),
    "spike": Kind("a factor and a number of steps, by default 10:1", spike_of, ("reduce",)),
    "flip": Kind("the name of a parameter, by default the first", _one_at_most, ("pre_step", "post_step")),
    "oserror": Kind("the name of an error, by default ENOSPC", _error_name, ("ckpt_.*", "log")),
    "oom": Kind(),
    "killworker": Kind("the number of a worker, by default 0", _number, ("worker",)),
    "stopworker": Kind("the number of a worker, by default 0", _number, ("worker",)),
}
"""Kinds of faults by name."""


def act(kind: str, arguments: Sequence[str], args: Sequence[Any]) -> None:
    """Carry out a fault that is not one of `VALUES` in this process."""
    if kind == "sleep":
        time.sleep(float(arguments[0]))
    elif kind == "flip":
        flip(args[0].model, *arguments)
    elif kind in _WORKER_SIGNALS:
        members = args[0].members
        members[int(arguments[0] if arguments else "0") % len(members)].signal(_WORKER_SIGNALS[kind])
    elif kind == "oserror":
        number = getattr(errno, arguments[0] if arguments else "ENOSPC")
        raise OSError(number, os.strerror(number), "injected")
    else:
        _ACTIONS[kind]()


def altered(x: Tensor, factor: float = 1.0, first: float | None = None) -> Tensor:
    """Copy of a tensor times a factor, with its first entry replaced by `first` unless `first` is None.

    The numbers are uploaded, so that on a lazy device a step with a fault has the same graph as one without.
    """
    replaces = 0.0 if first is None else 1.0
    numbers = torch.tensor([factor, replaces, first or 0.0]).to(x.device)
    flat = x.detach().reshape(-1) * numbers[0]
    return torch.cat([torch.where(numbers[1] > 0, numbers[2], flat[:1]), flat[1:]]).view(x.shape)


@torch.no_grad()
def flip(model: torch.nn.Module, name: str = "") -> None:
    """Turn over the lowest bit of the first entry of a parameter that this rank holds."""
    for own, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()
        if local.numel() and name in {"", own}:
            whole = local.cpu().clone()  # on lazy devices a write into a part would make the next step another graph
            bits = whole.view(-1)[:1].view(torch.uint8)
            bits[0] ^= 1
            local.copy_(whole.to(local.device))
            return
    raise InjectedError(f"this rank holds nothing of a parameter {name!r}")


def write_part(writer: Any, block: Any, where: int, length: int) -> None:
    """Write the first pages of a block as its writer does; the written bytes survive the process."""
    pages = -(-length // PAGE_BYTES) * PAGE_BYTES
    with memoryview(block) as view:
        os.pwrite(writer._file, view[:pages], where)


def _signal(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def _fail() -> NoReturn:
    raise InjectedError("injected failure")


def _run_out_of_memory() -> NoReturn:
    raise MemoryError("injected")


def _hang() -> NoReturn:
    while True:
        time.sleep(LONG_S)


def _hold_gil() -> NoReturn:
    libc = ctypes.PyDLL(None)
    while True:
        libc.sleep(LONG_S)


_ACTIONS: dict[str, Callable[[], object]] = {
    "kill": _signal(signal.SIGKILL),
    "stop": _signal(signal.SIGSTOP),
    "segv": lambda: ctypes.string_at(0),
    "exit": lambda: os._exit(1),
    "raise": _fail,
    "hang": _hang,
    "gil": _hold_gil,
    "term": _signal(signal.SIGTERM),
    "usr1": _signal(signal.SIGUSR1),
    "int": _signal(signal.SIGINT),
    "oom": _run_out_of_memory,
}
