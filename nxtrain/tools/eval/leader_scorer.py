"""Evaluation by a program that runs on rank 0 only, while every rank computes a part of the requested scores.

Recent releases of the lm-evaluation-harness give results to one process only. If each rank ran the harness, ranks could
request different texts, since each would keep its own cache of answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from traceback import walk_tb
from typing import Any, TypeVar

from nxtrain.common.distributed.agreement import Ranks
from nxtrain.common.errors import NxtrainError
from nxtrain.tools.eval.scorer import Scorer

T = TypeVar("T")


Call = tuple[str, tuple[Any, ...], Mapping[str, Any]]
"""Call of a scorer's method that the leader shares with all ranks: method name, arguments and options.

`END` as the method name ends the program with its result.
"""

END = ""


class LeaderScorer:
    """Scorer for a program on the leader; each call runs the same method of `Scorer` on every rank."""

    def __init__(self, scorer: Scorer, ranks: Ranks) -> None:
        self._scorer, self._ranks = scorer, ranks
        self.model = scorer.model

    def __getattr__(self, method: str) -> Callable[..., Any]:
        """Method of `Scorer` that runs on every rank; its callback `done` is called on the leader only."""

        def call(*arguments: Any, done: Callable[[int, Any], None], **options: Any) -> Any:
            self._ranks.on_leader(lambda: (method, arguments, options), f"cannot share the requests for {method}")
            return getattr(self._scorer, method)(*arguments, done=done, **options)

        return call


def run_on_leader(scorer: Scorer, ranks: Ranks, program: Callable[[LeaderScorer], T]) -> T:
    """Run a program on the leader, while all ranks compute its scores, and return its result on every rank.

    Every rank calls this function. An error of the program or of the scorer is raised on every rank.
    """
    if ranks.is_leader:
        try:
            result = program(LeaderScorer(scorer, ranks))
        except Exception as error:
            if not is_of_the_scorer(error):  # the other ranks wait, while an error of the scorer is raised on them
                with suppress(NxtrainError):
                    ranks.on_leader(partial(_fail, error), "the evaluation failed on rank 0")
            raise
        end: Call = (END, (result,), {})
        ranks.on_leader(lambda: end, "cannot share the results")
        return result
    while True:
        # The action that the leader passes runs; the action that is passed here does not.
        no_call = partial(_fail, AssertionError("the leader alone makes calls"))
        method, arguments, options = ranks.on_leader(no_call, "")
        if method == END:
            return arguments[0]  # type: ignore[no-any-return]
        getattr(scorer, method)(*arguments, **options)


def is_of_the_scorer(error: Exception) -> bool:
    """Return True if the scorer raised an error, and not the program that uses the scorer."""
    return any(frame.f_globals.get("__name__") == Scorer.__module__ for frame, _ in walk_tb(error.__traceback__))


def _fail(error: Exception) -> Call:
    raise error
