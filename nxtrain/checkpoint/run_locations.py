"""Locations of a run's checkpoints: the `checkpoints` folder on each disk, and the mirror."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from nxtrain.checkpoint import directory
from nxtrain.checkpoint.mirror import Mirror
from nxtrain.common.distributed.agreement import StorageScope
from nxtrain.common.io.object_store import Location

T = TypeVar("T")

MIRROR = -1
"""Key of the mirror among the locations of a run; the key of a disk is the rank of its leader."""


@dataclass(frozen=True)
class RunLocations:
    """Locations of a run's checkpoints: a disk per node or shared, and the mirror. Every rank makes the same calls."""

    folder: Path
    mirror: Mirror | None
    scope: StorageScope

    @property
    def root(self) -> Location | None:
        """Root of the mirror; None without a mirror."""
        if self.mirror is None:
            return None
        return self.mirror.store.root

    def act(self, on_disk: Callable[[], T], in_mirror: Callable[[Mirror], T], failure: str) -> dict[int, T]:
        """Call a function on the leader of each disk, then another for the mirror; return the results by location."""
        mirror = self.mirror
        results = self.scope.on_each(on_disk, f"{failure} in {self.folder}")
        if mirror is not None:
            results[MIRROR] = self.scope.ranks.on_leader(lambda: in_mirror(mirror), f"{failure} in {mirror}")
        return results

    def abandon(self, after: Mapping[int, int], *, damaged: bool) -> list[int]:
        """Abandon the checkpoints after a step in each given location; see `directory.abandon`.

        Args:
            after: Last step to keep, by location; other locations keep all checkpoints.
            damaged: Also abandon quarantined checkpoints.

        Returns:
            Steps of the abandoned checkpoints.
        """

        def on_disk() -> list[int]:
            if self.scope.leader not in after:
                return []
            return directory.abandon(self.folder, after[self.scope.leader], damaged=damaged)

        def in_mirror(mirror: Mirror) -> list[int]:
            if MIRROR not in after:
                return []
            return mirror.abandon(after[MIRROR], damaged=damaged)

        abandoned = self.act(on_disk, in_mirror, "cannot rename checkpoints that are no longer part of the run")
        return sorted(set[int]().union(*abandoned.values()))

    def quarantine(self, steps: Mapping[int, Iterable[int]], failure: str) -> dict[int, dict[int, str]]:
        """Quarantine the checkpoints of steps in each location; return their new names by location and step."""

        def on_disk() -> dict[int, str]:
            names: dict[int, str] = {}
            for step in steps.get(self.scope.leader, ()):
                names[step] = directory.quarantine(directory.step_path(self.folder, step)).name
            return names

        def in_mirror(mirror: Mirror) -> dict[int, str]:
            return {step: mirror.quarantine(step) for step in steps.get(MIRROR, ())}

        return self.act(on_disk, in_mirror, failure)
