"""Who causes a hang, from what all ranks were doing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from types import FrameType

from nxtrain.distributed.heartbeats import Beat, HeartbeatStore
from nxtrain.distributed.host_group import spans

SHOWN = 4
"""Ranks whose doings a message tells."""

WAITING = ("/torch/distributed/", "/nxtrain/distributed/", "/nxtrain/backends/")
"""Folders of the code in which a rank waits for others, or for a device that does."""

OURS = ("/nxtrain/", "/models/")

GATE = "/nxtrain/train/supervision/coordinated_stop.py"
"""Where a rank waits for the others' word, in functions of Python's own."""


def waits(frame: FrameType | None) -> bool:
    """Whether a thread waits for other ranks, as far as its innermost function tells."""
    if frame is None:
        return False
    if any(folder in frame.f_code.co_filename for folder in WAITING):
        return True
    while frame is not None and frame.f_code.co_filename == threading.__file__:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.endswith(GATE)


def point(frame: FrameType | None) -> str:
    """Where a thread is: its innermost function, and the innermost of ours if that is another."""
    if frame is None:
        return ""
    inner, ours = frame, frame
    while ours.f_back is not None and not any(folder in ours.f_code.co_filename for folder in OURS):
        ours = ours.f_back
    text = _place(inner)
    if ours is not inner and any(folder in ours.f_code.co_filename for folder in OURS):
        text += f", called from {_place(ours)}"
    return text


def _place(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


def agree(board: HeartbeatStore, beat: Beat, world: int, words: Callable[[int], str], limit: str) -> str:
    """Say that the run hangs, and find with all ranks that still live who causes it; the first to say so judges.

    Args:
        board: Where the ranks meet.
        beat: What this rank does.
        world: How many there are.
        words: Names a rank.
        limit: Name and value of the time that a rank has.

    Returns:
        The verdict; empty if the rank that judges does not get to it.

    Raises:
        RuntimeError: The store is gone.
    """
    first = board.declare_hang()
    board.answer(beat)
    if not first:
        return board.verdict()
    found = board.answers()
    silent = set(range(world)) - found.keys()
    verdict = judge(found, silent, board.last_beats(silent), words, limit)
    board.judge(verdict)
    return verdict


def judge(
    found: Mapping[int, Beat], silent: Set[int], last: Mapping[int, Beat], words: Callable[[int], str], limit: str
) -> str:
    """Say in words who keeps the others waiting.

    Args:
        found: What each rank does that gave a sign of life.
        silent: Those that gave none.
        last: What these said before.
        words: Names a rank.
        limit: Name and value of the time that a rank has.
    """
    late = f"did not come within {limit} seconds"
    if silent:
        told = ", ".join(_names(sorted(silent), words))
        seen = "; ".join(f"rank {rank} was last in {last[rank]}" for rank in sorted(last)[:SHOWN])
        return f"{told} {late} and gives no sign of life: the process is stopped, or something holds Python's lock" + (
            f"; {seen}" if seen else ""
        )
    busy = {rank: beat for rank, beat in found.items() if not beat.waits} or found
    first = min(beat.step for beat in busy.values())
    behind = sorted(rank for rank, beat in busy.items() if beat.step == first)
    doing = "; ".join(f"rank {rank} is in {busy[rank]}" for rank in behind[:SHOWN])
    if len(behind) == len(found) > 1:
        return f"all ranks wait for each other, and none {late}: {doing}"
    return f"{', '.join(_names(behind, words))} {late}: {doing}"


def _names(ranks: list[int], words: Callable[[int], str]) -> list[str]:
    return [words(rank) for rank in ranks] if len(ranks) <= SHOWN else [f"ranks {spans(ranks)}"]
