"""Observers of a run: several act as one, and each call of a run reaches all of them in order."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from nxtrain.metrics.run_observer import Observers, RunObserver

METHODS = [name for name, item in vars(RunObserver).items() if inspect.isfunction(item)]
ARGUMENTS = {
    "begin": (3,),
    "enter": (4, "training"),
    "section": ("forward",),
    "finish": (4,),
    "measure": (4,),
    "beat": (),
    "stopping": ("SIGTERM at rank 0",),
    "end": ("failed", "ValueError: why"),
}


def recorder(name: str, calls: list[tuple[Any, ...]]) -> RunObserver:
    """Observer that records each call under a name."""

    def method(called: str) -> Any:
        def call(self: RunObserver, *args: Any) -> dict[str, float] | None:
            calls.append((name, called, *args))
            return {name: 1.0} if called == "measure" else None

        return call

    kind: type[RunObserver] = type("Recorder", (RunObserver,), {called: method(called) for called in METHODS})
    return kind()


@pytest.mark.parametrize("called", METHODS)
def test_each_call_reaches_all_observers_in_order(called: str) -> None:
    calls: list[tuple[Any, ...]] = []
    observers = Observers(recorder("first", calls), recorder("second", calls))
    getattr(observers, called)(*ARGUMENTS[called])
    assert calls == [(name, called, *ARGUMENTS[called]) for name in ("first", "second")]


def test_values_of_all_observers_are_recorded() -> None:
    assert Observers(recorder("a", []), RunObserver(), recorder("b", [])).measure(1) == {"a": 1.0, "b": 1.0}
