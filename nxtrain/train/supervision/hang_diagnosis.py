"""Diagnosis of a hang: finds the ranks that cause it, from the heartbeats of all ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Set
from itertools import chain
from pathlib import Path
from types import FrameType

from nxtrain.common.distributed.heartbeats import Beat, HeartbeatStore
from nxtrain.common.mesh import spans

SHOWN = 4
"""Largest number of ranks whose state a message shows."""

WAITING = ("/torch/distributed/", "/nxtrain/common/distributed/", "/nxtrain/backends/")
"""Folders of code in which a rank waits for other ranks, or for a device that waits for them."""

OURS = ("/nxtrain/", "/models/")

GATE = "/nxtrain/train/supervision/coordinated_stop.py"
"""File whose functions wait for the agreement of other ranks inside Python's `threading`."""


def waits(frame: FrameType | None) -> bool:
    """True if the innermost function of a thread waits for other ranks."""
    if frame is None:
        return False
    if any(folder in frame.f_code.co_filename for folder in WAITING):
        return True
    while frame is not None and frame.f_code.co_filename == threading.__file__:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.endswith(GATE)


def point(frame: FrameType | None) -> str:
    """Position of a thread in the code: its innermost function, and the innermost function of nxtrain if it differs."""
    if frame is None:
        return ""
    inner, ours = frame, frame
    while ours.f_back is not None and not any(folder in ours.f_code.co_filename for folder in OURS):
        ours = ours.f_back
    text = _position(inner)
    if ours is not inner and any(folder in ours.f_code.co_filename for folder in OURS):
        text += f", called from {_position(ours)}"
    return text


def _position(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


def agree(board: HeartbeatStore, beat: Beat, world: int, rank_name: Callable[[int], str], limit: str) -> str:
    """Declare a hang, and agree with all responsive ranks on its cause; the first rank to declare it is the judge.

    Args:
        board: Store of heartbeats.
        beat: Heartbeat of this rank.
        world: Number of ranks.
        rank_name: Returns the name of a rank for messages.
        limit: Time limit in seconds, as text.

    Returns:
        The verdict on the cause; empty if the judge does not publish one.
    """
    first = board.declare_hang()
    board.answer(beat)
    if not first:
        return board.verdict()
    answers = board.answers()
    silent = set(range(world)) - answers.keys()
    verdict = judge(answers, silent, board.last_beats(silent), rank_name, limit)
    board.judge(verdict)
    return verdict


def judge(
    answers: Mapping[int, Beat], silent: Set[int], last: Mapping[int, Beat], rank_name: Callable[[int], str], limit: str
) -> str:
    """Verdict on the cause of a hang: the ranks that keep the others waiting, as text.

    Args:
        answers: Heartbeat of each rank that answered.
        silent: Ranks that did not answer.
        last: Last heartbeats of the silent ranks before the hang.
        rank_name: Returns the name of a rank for messages.
        limit: Time limit in seconds, as text.
    """
    late = f"did not come within {limit} seconds"
    hosts = {rank: beat.host for rank, beat in {**last, **answers}.items()}
    if silent:
        named = ", ".join(_names(sorted(silent), rank_name, hosts))
        seen = "; ".join(f"rank {rank} was last in {last[rank]}" for rank in sorted(last)[:SHOWN])
        verdict = f"{named} {late} and gives no sign of life: the process is stopped, or something holds Python's lock"
        if seen:
            verdict += f"; {seen}"
        return verdict
    busy = {rank: beat for rank, beat in answers.items() if not beat.waits}
    if not busy:
        without, why = _late_on_device(answers)
        if without:
            return f"{', '.join(_names(without, rank_name, hosts))} {late}: {why}"
        busy = dict(answers)
    first = min(beat.step for beat in busy.values())
    behind = sorted(rank for rank, beat in busy.items() if beat.step == first)
    doing = "; ".join(f"rank {rank} is in {busy[rank]}" for rank in behind[:SHOWN])
    if len(behind) == len(answers) > 1:
        return f"all ranks wait for each other, and none {late}: {doing}"
    return f"{', '.join(_names(behind, rank_name, hosts))} {late}: {doing}"


def _late_on_device(answers: Mapping[int, Beat]) -> tuple[list[int], str]:
    """Ranks that have not queued a collective in which other ranks' devices wait, with a reason; empty if unknown.

    A rank that waits in another collective is named only if all late ranks do.
    """
    reasons: dict[int, str] = {}
    for name in sorted(set(chain.from_iterable(beat.queued for beat in answers.values()))):
        queued = {rank: beat.queued[name] for rank, beat in answers.items() if name in beat.queued}
        number = max(entry.number for entry in queued.values())
        waiting = [rank for rank, entry in queued.items() if entry.number == number > entry.done]
        if waiting:
            work = f"{queued[waiting[0]].operation}, number {number} of communicator {name}"
            where = f"has not queued {work}, in which the device of rank {spans(sorted(waiting))} waits"
            reasons.update({rank: where for rank, entry in queued.items() if entry.number < number})
    idle = []
    for rank in reasons:
        if all(entry.done >= entry.number for entry in answers[rank].queued.values()):
            idle.append(rank)
    named = sorted(idle or reasons)
    return named, "; ".join(f"rank {rank} {reasons[rank]}" for rank in named[:SHOWN])


def _names(ranks: list[int], rank_name: Callable[[int], str], hosts: Mapping[int, str]) -> list[str]:
    """Names of ranks, with their hosts if the run has several hosts; more than `SHOWN` ranks share one name."""
    if len(ranks) > SHOWN:
        return [f"ranks {spans(ranks)}{_at([hosts.get(rank, '') for rank in ranks], hosts)}"]
    return [f"{rank_name(rank)}{_at([hosts.get(rank, '')], hosts)}" for rank in ranks]


def _at(named: list[str], hosts: Mapping[int, str]) -> str:
    names = sorted({*named} - {""})
    if len({*hosts.values()}) == 1 or not names:
        return ""
    shown = ", ".join(names[:SHOWN])
    if len(names) > SHOWN:
        shown += " and others"
    return f" ({shown})"
