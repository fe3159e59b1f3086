"""Fault injection for tests: `NXTRAIN_FAULTS=kind@rank:step:point[:argument...][,...]` breaks a run on purpose.

No other part of a run imports this module. If the variable is set, `nxtrain train` wraps the functions at the fault
points. A fault fires once, and not again after a restart, since a file in run.dir/faults records it. A `kind!` fault
fires every time.
"""

from __future__ import annotations

import functools
import importlib
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from nxtrain.common.process.console import standard_error
from nxtrain.common.run_folder import FAULTS_DIR
from nxtrain.common.testing import fault_kinds
from nxtrain.common.testing.fault_points import GRADIENTS, LOSS, POINTS, VARIABLE, Fault, PatchPoint, parse

DATA_THREADS = "nxtrain-data"


def arm(text: str, run_dir: Path, rank: int) -> None:
    """Wrap the functions at the points of all faults in `text`, for the rest of this process."""
    faults = parse(text)
    standard_error(quiet=rank != 0).print(
        f"warning: {VARIABLE} is set, and this run will be broken on purpose: {', '.join(f.text for f in faults)}",
        style="yellow",
    )
    _Armed(faults, run_dir / FAULTS_DIR, rank).wrap()


class _Armed:
    """Active faults of one rank, and the folder with a marker file for each fault that has fired."""

    def __init__(self, faults: Sequence[Fault], folder: Path, rank: int) -> None:
        self._faults = [fault for fault in faults if fault.rank in {None, rank}]
        self._folder, self._rank = folder, rank
        # For faults of any rank: all ranks must compute the same graph on a lazy device.
        self._alters = any(fault.kind in fault_kinds.VALUES for fault in faults)
        self._step, self._in_step = 0, False
        self._saved = 0  # checkpoints are written while steps go on
        self._slept: dict[Fault, int] = {}
        self._values: list[Fault] = []
        self._spoiled: set[Fault] = set()

    def wrap(self) -> None:
        for point in {fault.point for fault in self._faults}:
            target = POINTS[point]
            _replace(target, functools.partial(self._at_point, point=point, when=target.when))
        if self._alters:
            for target in GRADIENTS:
                _replace(target, self._on_gradients)
            _replace(LOSS, self._on_loss)

        def begin_save(fill: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                self._saved = self._step
                return fill(*args, **kwargs)

            return wrapped

        def begin_run(run: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(trainer: Any, finished: int) -> Any:
                self._step = finished
                return run(trainer, finished)

            return wrapped

        _replace(POINTS["ckpt_stage"], begin_save)
        # Outermost, so that every fault in a step sees that step's number.
        _replace(PatchPoint("nxtrain.train.trainer", "update"), self._count_steps)
        _replace(PatchPoint("nxtrain.train.trainer:Trainer", "run"), begin_run)

    def _count_steps(self, update: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self._step += 1
            self._in_step = True
            self._spoiled.clear()
            self._values = [fault for fault in self._faults if self._changes_values_now(fault)]
            try:
                return update(*args, **kwargs)
            finally:
                self._in_step = False

        return wrapped

    def _changes_values_now(self, fault: Fault) -> bool:
        if fault.kind == "spike":  # lasts for its steps, on replay as well
            return fault.is_due(self._rank, self._step, within=fault_kinds.spike_of(fault.arguments)[1])
        is_due = fault.kind in fault_kinds.VALUES and fault.is_due(self._rank, self._step)
        return is_due and self._fires(fault, self._step)

    def _at_point(
        self, function: Callable[..., Any], *, point: str, when: Literal["before", "after", "writing"]
    ) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            step = self._saved if point.startswith("ckpt_") and point != "ckpt_stage" else self._step
            if point in {"data", "worker"}:
                step = args[1] + 1
                if not threading.current_thread().name.startswith(DATA_THREADS):
                    return function(*args, **kwargs)
            if when == "before":
                self._reach(point, step, args)
            if when == "writing":
                self._reach_in_block(point, step, args)
            result = function(*args, **kwargs)
            if when == "after":
                self._reach(point, step, args)
            return result

        return wrapped

    def _reach_in_block(self, point: str, step: int, args: Sequence[Any]) -> None:
        """Write the bytes of a block that precede a fault, then fire the fault."""
        writer, block, where, length = args
        for fault in self._faults:
            if fault.point == point and where <= fault.after_bytes < where + length:
                fault_kinds.write_part(writer, block, where, fault.after_bytes - where)
                self._reach(point, step, args, [fault])

    def _reach(self, point: str, step: int, args: Sequence[Any], among: Sequence[Fault] | None = None) -> None:
        """Fire the faults that are due at a point in a step."""
        for fault in self._faults if among is None else among:
            if fault.point != point or fault.kind in fault_kinds.VALUES:
                continue
            if fault.kind == "sleep":  # from its step on, once in each
                if (fault.step is None or fault.step <= step) and self._slept.get(fault) != step:
                    self._slept[fault] = step
                    fault_kinds.act(fault.kind, fault.arguments, args)
            elif fault.is_due(self._rank, step) and self._fires(fault, step):
                fault_kinds.act(fault.kind, fault.arguments, args)

    def _fires(self, fault: Fault, step: int) -> bool:
        """True if a due fault fires now: a repeating fault always fires, any other once.

        The fault is recorded in the faults folder for later starts.
        """
        if not fault.repeats:
            name = re.sub(r"[^\w!-]+", "-", fault.text.replace("*", "all"))
            self._folder.mkdir(parents=True, exist_ok=True)
            try:
                (self._folder / f"{name}.step{step}.rank{self._rank}").touch(exist_ok=False)
            except FileExistsError:
                return False
        standard_error().print(f"rank {self._rank}: fault {fault.text} fires in step {step}", style="yellow")
        return True

    def _on_gradients(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def wrapped(*args: Any, **kwargs: Any) -> Tensor:
            grad = function(*args, **kwargs)
            factor, first = 1.0, None
            for fault in self._values:
                if fault.kind == "spike":
                    factor *= fault_kinds.spike_of(fault.arguments)[0]
                elif fault.point != "bwd" and fault not in self._spoiled and grad.numel():
                    self._spoiled.add(fault)
                    first = float(fault.kind)
            return fault_kinds.altered(grad, factor, first)

        return wrapped

    def _on_loss(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def wrapped(loss: Tensor, targets: Tensor) -> Tensor:
            if not self._in_step:
                return function(loss, targets)
            values = [float(fault.kind) for fault in self._values if fault.point in {"fwd", "bwd"}]
            return function(fault_kinds.altered(loss.detach(), 1.0, values[0] if values else None), targets)

        return wrapped


def _replace(target: PatchPoint, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    owner = owner_of(target)
    setattr(owner, target.attribute, wrapper(getattr(owner, target.attribute)))


def owner_of(target: PatchPoint) -> Any:
    """Module or class that has the function of a patch point."""
    module, _, class_name = target.owner.partition(":")
    owner = importlib.import_module(module)
    return getattr(owner, class_name) if class_name else owner
