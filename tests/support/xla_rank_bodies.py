"""What the processes of `xla_ranks` do; imported by name there."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from unittest.mock import patch

from nxtrain.backends import xla
from nxtrain.backends.c10d import Placement
from nxtrain.backends.xla_world import join
from nxtrain.config.check import Resolved
from nxtrain.errors import NxtrainError
from nxtrain.graphs import trace
from tests.support.graph_mutants import MUTANTS


def outcomes(place: Placement, plan: Resolved, steps: int, mutants: Sequence[str]) -> list[list[str]]:
    """Train on paper with each defect: class and message of what ended it, and the graphs that were handed over."""
    found = []
    with patch.object(xla, "join", cache(join)):  # one process group for all cases
        for mutant in mutants:
            tape = trace._Tape(rank=place.rank)
            with MUTANTS[mutant]():
                try:
                    trace._play(plan, place.world, tape, steps)
                    ended = ["", ""]
                except NxtrainError as error:
                    ended = [type(error).__name__, str(error)]
            found.append([*ended, *(cut.hash for cut in tape.cuts)])
    return found
