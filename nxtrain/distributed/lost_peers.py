"""Which rank was lost, from what the carriers of `torch.distributed` say of a connection."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from nxtrain.errors import HangError, LostPeerError

_GONE = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|Socket closed|recv, got 0 bytes|ncclRemoteError", re.IGNORECASE
)
"""What gloo, torch's store and NCCL say of a connection whose other end is gone."""

_LATE = re.compile(r"tim(ed|e) ?out", re.IGNORECASE)
"""What gloo and torch's store say when the other end does not come."""


@dataclass(frozen=True)
class Peers:
    """Those that a rank waits for.

    Args:
        words: How messages name them.
        rank: Its number if it is one; None: any of several.
        hang_timeout_s: Seconds that the group waits for them; 0: unknown.
    """

    words: str
    rank: int | None = None
    hang_timeout_s: float = 0.0


ANY = Peers("a rank that this one works with")


@contextmanager
def blaming(peers: Peers) -> Iterator[None]:
    """Turn what gloo says of a connection into what became of its other end; other failures stay what they are.

    NCCL says nothing here, since waiting is left to the stream: torch's watchdog ends the process after the same time.

    Source: torch 2.9, torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp; gloo/transport/tcp in
    https://github.com/pytorch/gloo.
    """
    try:
        yield
    except RuntimeError as error:
        found = loss(error, peers)
        if found is None:
            raise
        raise found from error


def loss(error: BaseException, peers: Peers = ANY) -> LostPeerError | HangError | None:
    """The loss of a peer, if that is what a failure comes from."""
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, LostPeerError | HangError):
            return at
        if isinstance(at, RuntimeError) and _GONE.search(str(at)):
            return _gone(at, peers)
        if isinstance(at, RuntimeError) and _LATE.search(first_line(at)):
            return _late(at, peers)
        at = at.__cause__
    return None


def _gone(error: RuntimeError, peers: Peers) -> LostPeerError:
    return LostPeerError(
        f"{peers.words} is gone: {first_line(error)}. It died, or left early; its own last lines say why", peers.rank
    )


def _late(error: RuntimeError, peers: Peers) -> HangError:
    limit = f"={peers.hang_timeout_s:g} seconds" if peers.hang_timeout_s else ""
    return HangError(
        f"{peers.words} did not come within recovery.hang_timeout_s{limit}: {first_line(error)}. "
        "It hangs, or does other work than was agreed; its own last lines say more",
        peers.rank,
    )


def first_line(error: BaseException) -> str:
    """What an error says, or what it is if it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
