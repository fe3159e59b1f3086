"""Choice of the checkpoint to resume from, and of the place where each rank reads it: local disk, mirror, or both."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from nxtrain.checkpoint import directory, mirror
from nxtrain.checkpoint.load import open_checkpoint
from nxtrain.checkpoint.manifest import Manifest
from nxtrain.checkpoint.meta import read_meta
from nxtrain.checkpoint.mirror import Mirrored
from nxtrain.checkpoint.rewinds import Rewind, RewindLog
from nxtrain.config.schema import RunConfig
from nxtrain.distributed.agreement import Ranks
from nxtrain.errors import CheckpointError, DamagedError
from nxtrain.io.checksummed_file import verify
from nxtrain.io.object_store import Location, place_of
from nxtrain.io.read_retry import unsteady
from nxtrain.run_folder import CHECKPOINTS_DIR

T = TypeVar("T")

PrintLine = Callable[[str], None]


@dataclass(frozen=True)
class Found:
    """The checkpoint to resume from.

    Args:
        place: Location from which this rank reads.
        copies: Other locations for blocks that are missing or damaged in `place`.
    """

    place: Location
    copies: tuple[Location, ...] = ()


@dataclass(frozen=True)
class _Holding:
    """Files of a checkpoint on one disk.

    Args:
        wanted: Names of the files of all ranks; empty if the disk has no manifest.
        present: Names of the files on this disk that have the right length.
    """

    wanted: tuple[str, ...] = ()
    present: tuple[str, ...] = ()


class ResumePlanner:
    """Finds the checkpoint to resume from; quarantines damaged checkpoints, and abandons those after a rewind.

    Every rank makes one planner, and makes the same calls.

    Args:
        config: Configuration of the run.
        mirrored: Mirror of the run, if it has one.
        ranks: All ranks of the run.
        print_line: Prints a line for people.
        restarted: True if, by this rank's environment, an agent or a scheduler restarted the same command.
        job: The agent's or scheduler's name for the restarted job; empty if it has none.

    Attributes:
        own: The run resumes from its own newest checkpoint: damaged ones are quarantined. False if the run starts from
            another run's checkpoint, or rewinds on purpose.

    Raises:
        CheckpointError: The mirror, or a disk, belongs to another run.
    """

    def __init__(
        self,
        config: RunConfig,
        mirrored: Mirrored | None,
        ranks: Ranks,
        print_line: PrintLine,
        *,
        restarted: bool,
        job: str = "",
    ) -> None:
        self._resume, self._folder = config.checkpoint.resume, config.run.dir / CHECKPOINTS_DIR
        self._mirrored, self._ranks, self._print_line = mirrored, ranks, print_line
        self._chosen: Found | None = None
        self._unread = set[int]()
        # One restarted rank is enough: an agent that replaces another one has made no earlier start itself.
        answers = ranks.gather((restarted, job))
        is_restart, self._job = any(again for again, _ in answers), answers[0][1]
        at_mirror = ranks.on_leader(self._aims_at_mirror, "cannot look for checkpoints")
        records = self._records = RewindLog(config.run.dir, mirrored, ranks, takes_over=at_mirror)
        has_returned = records.newest.has_returned(self._resume, self._job)
        self.own = self._resume == "auto" or (is_restart and has_returned)
        if is_restart and not self.own and records.damaged:
            raise CheckpointError(
                f"{records.damaged[0]}; it would tell whether the run went back as checkpoint.resume={self._resume} "
                "says, or is still to. Start it anew with the same to go back, or with checkpoint.resume=auto to go on "
                "from its newest checkpoint"
            )
        self._print_lines(f"WARNING: {error}; it is written anew" for error in records.damaged)
        if self.own:
            self._report_abandoned(records.abandon_missed(), "the run went back where this was not seen")
        elif has_returned:  # by an earlier start with the same request, which a restart must not take for this one's
            known = len(records.newest.returns)
            records.add(Rewind(told="", job=self._job))
            records.write(known)

    def choose(self) -> Found | None:
        """Choose the checkpoint to resume from; None: start from scratch.

        Raises:
            CheckpointError: The requested path has no checkpoint, or all checkpoints of the run are damaged.
        """
        self._chosen = self._newest_own() if self.own else None
        if self._chosen is not None or self._resume == "auto":
            return self._chosen
        if self.own:
            self._print_line(f"nothing that the run reached since is left: it goes back to {self._resume} again")
        self.own = False
        if self._resume != "never":
            self._chosen = Found(
                self._ranks.on_leader(lambda: mirror.locate_checkpoint(self._resume), "cannot look for checkpoints")
            )
        return self._chosen

    def quarantine(self, found: Found, error: DamagedError) -> str:
        """Quarantine a damaged checkpoint, and return a description for people.

        A checkpoint that cannot be read at all keeps its name, and the previous one is tried. If that cannot be read
        either, the storage has failed rather than the files.
        """
        failure = f"cannot put aside {found.place}"
        if self._ranks.on_leader(lambda: error.unread, failure):
            self._unread.add(int(found.place.name.removeprefix("step-")))
            return "the one before it is tried"
        if self._mirrored is None:
            assert isinstance(found.place, Path)
            path = found.place
            aside = self._ranks.on_leader(lambda: directory.quarantine(path), failure).name
            return f"the checkpoint is put aside as {aside}, and the one before it is tried"
        step = int(found.place.name.removeprefix("step-"))
        local, there = directory.step_path(self._folder, step), self._mirrored.mirror
        self._mirrored.scope.over(self._ranks).on_each(
            lambda: directory.is_checkpoint(local) and directory.quarantine(local), failure
        )
        self._ranks.on_leader(lambda: step in there.steps() and there.quarantine(step), failure)
        return f"step {step} is put aside on disks and in {there}, and the one before it is tried"

    def begin(self) -> None:
        """Start from the chosen checkpoint, after it was loaded: abandon later checkpoints, then record the rewind.

        The record comes last: if the start is interrupted before it, a restart rewinds again.
        """
        keeps, in_folder, in_mirror = self._ranks.on_leader(
            self._keeps, f"cannot look for checkpoints in {self._folder}"
        )
        gone = list[int]()
        if not self.own:  # a place that missed earlier rewinds keeps its checkpoints if the chosen one is among them
            gone += self._records.abandon_missed(on_disks=not in_folder, in_mirror=not in_mirror)
            self._records.add(Rewind(told=self._resume, job=self._job, keeps=keeps))
        gone += self._records.abandon(keeps, damaged=not self.own)
        where = self._chosen.place if self._chosen else "scratch"
        self._report_abandoned(sorted({*gone}), f"the run goes on from {where}")
        self._records.write()

    def _keeps(self) -> tuple[int, bool, bool]:
        """Last step that stays part of the run; True if the chosen checkpoint is in the folder, and in the mirror."""
        if self._chosen is None:
            return 0, False, False
        place, there = self._chosen.place, self._mirrored.mirror.store.root if self._mirrored else None
        here = mirror.step_in(self._folder, place)
        copied = mirror.step_in(there, place) if there is not None else None
        inside = [step for step in (here, copied) if step is not None]
        return inside[0] if inside else -1, here is not None, copied is not None

    def _aims_at_mirror(self) -> bool:
        if self._mirrored is None or self._resume in {"auto", "never"}:
            return False
        place, root = place_of(self._resume), self._mirrored.mirror.store.root
        return mirror.is_same(place, root) or mirror.step_in(root, place) is not None

    def _newest_own(self) -> Found | None:
        if self._mirrored is not None:
            return self._newest(self._mirrored)
        place = self._ranks.on_leader(self._newest_here, "cannot look for checkpoints")
        return Found(place) if place is not None else None

    def _newest_here(self) -> Path | None:
        for found in reversed(directory.list_checkpoints(self._folder)):
            if directory.step_of(found) not in self._unread and self._is_own(directory.step_of(found)):
                return found
        self._refuse_scratch([path.name for path in directory.quarantined(self._folder)])
        return None

    def _is_own(self, step: int) -> bool:
        """False for step 0 with `checkpoint.resume=never`: a converted checkpoint there is not a start from scratch."""
        return step > 0 or self._resume != "never"

    def _report_abandoned(self, steps: list[int], why: str) -> None:
        if steps:
            named = ", ".join(directory.step_path(Path(), step).name for step in steps)
            self._print_line(f"{why}: put aside as abandoned, since no part of it any more: {named}")

    def _refuse_scratch(self, damaged: list[str]) -> None:
        if self._unread:
            named = ", ".join(directory.step_path(Path(), step).name for step in sorted(self._unread))
            raise CheckpointError(
                f"{named} of {self._folder} cannot be read, and there is none before it. Start again when the storage "
                "is back, or use checkpoint.resume=PATH of another one, or never to start from scratch"
            )
        if damaged and self._resume in {"auto", "never"}:
            raise CheckpointError(
                f"every checkpoint of {self._folder} is damaged: {', '.join(damaged)}. Use "
                "checkpoint.resume=PATH of another one, or checkpoint.resume=never to start from scratch"
            )

    def _newest(self, mirrored: Mirrored) -> Found | None:
        there = mirrored.mirror
        here = self._on_disks(self._held, dict[int, int]())
        copied = self._ranks.on_leader(self._mirror_held, f"cannot look for checkpoints in {there}")
        self._print_lines(copied[1])
        # If a step was written twice, the version on the disks is the later one.
        candidates = {
            (step, copied[0].get(step) != seal, seal)
            for held in (*here, copied[0])
            for step, seal in held.items()
            if step not in self._unread and self._is_own(step)
        }
        for step, only_here, seal in sorted(candidates, reverse=True):
            if not only_here or self._complete(mirrored, step, seal):
                return self._found(mirrored, step, seal, only_here=only_here and mirrored.scope.number == 1)
        aside = self._on_disks(lambda notes: [path.name for path in directory.quarantined(self._folder)], list[str]())
        spoilt = self._ranks.on_leader(there.spoilt, f"cannot look for checkpoints in {there}")
        self._refuse_scratch(sorted({name for names in aside for name in names}) + spoilt)
        return None

    def _found(self, mirrored: Mirrored, step: int, seal: int, *, only_here: bool) -> Found:
        self._on_disks(lambda notes: self._manifest(step, seal, notes) is not None, False)
        local, there = directory.step_path(self._folder, step), mirrored.mirror.place(step)
        if only_here:
            return Found(local)
        is_here = directory.is_checkpoint(local) and read_meta(local).manifest_crc32 == seal
        return Found(local, (there,)) if is_here else Found(there)

    def _complete(self, mirrored: Mirrored, step: int, seal: int) -> bool:
        """True if the disks together hold a checkpoint that the mirror lacks; several disks first copy it there."""
        path, there = directory.step_path(self._folder, step), mirrored.mirror
        manifest: Manifest | None = None

        def look(notes: list[str]) -> _Holding:
            nonlocal manifest
            manifest = self._manifest(step, seal, notes)
            files = manifest.files if manifest else {}
            sizes = {name: (path / name).stat().st_size for name in files if (path / name).is_file()}
            return _Holding(tuple(files), tuple(n for n, file in files.items() if sizes.get(n) == file.num_bytes))

        holdings = self._on_disks(look, _Holding())
        holders = {name: rank for rank, holding in reversed(list(enumerate(holdings))) for name in holding.present}
        sealers = [rank for rank, holding in enumerate(holdings) if holding.wanted]
        absent = sorted({name for holding in holdings for name in holding.wanted} - holders.keys())
        if absent or not sealers:
            reason = f"no disk holds its {absent[0]} whole" if absent else "its manifest is damaged"
            self._print_lines([f"step {step} is not in {there}, and {reason}; the one before it is tried"])
            return False
        if mirrored.scope.number == 1:
            return True

        def check() -> None:
            for name in holdings[self._ranks.mesh.rank].present:
                if holders[name] == self._ranks.mesh.rank and manifest is not None:
                    verify(path / name, manifest.files[name].stored)

        def add() -> None:
            for name in holdings[self._ranks.mesh.rank].present:
                if holders[name] == self._ranks.mesh.rank and manifest is not None:
                    there.add(step, path / name, manifest.files[name].stored)

        def finish() -> None:
            if self._ranks.mesh.rank == sealers[0]:
                there.finish(step, path)

        failure = f"cannot copy {path.name} to {there}, and nodes cannot read each other's disks"
        try:
            self._ranks.on_all(check, failure)  # before `begin` deletes the mirror's version of the step
        except DamagedError as error:
            unsteady.hold(error)
            self._print_lines([f"WARNING: {error}; step {step} is not in {there}, so that the one before it is tried"])
            return False
        # A failure from here on is no damage, and ends the start: a resume from an earlier step would abandon this one.
        self._ranks.on_leader(lambda: there.begin(step), failure)
        self._ranks.on_all(add, failure)
        self._ranks.on_all(finish, failure)
        return True

    def _on_disks(self, action: Callable[[list[str]], T], otherwise: T) -> list[T]:
        """Run an action on the leader of each disk; return the result of each rank, and print the lines of notes."""
        assert self._mirrored is not None
        leads, notes, mine = self._mirrored.scope.leads, list[str](), [otherwise]

        def act() -> None:
            if leads:
                mine[0] = action(notes)

        self._ranks.on_all(act, f"cannot look for checkpoints in {self._folder}")
        found = self._ranks.gather((mine[0], notes))
        self._print_lines([note for _, noted in found for note in noted])
        return [result for result, _ in found]

    def _print_lines(self, notes: Iterable[str]) -> None:
        for note in notes:
            self._print_line(note)

    def _held(self, notes: list[str]) -> dict[int, int]:
        """Checkpoints of this disk, as step and checksum of the manifest; damaged ones are quarantined."""
        held = {}
        for path in directory.list_checkpoints(self._folder):
            try:
                held[directory.step_of(path)] = read_meta(path).manifest_crc32
            except DamagedError as error:
                notes.append(f"{error}; {_quarantine(path, error)}")
        return held

    def _mirror_held(self) -> tuple[dict[int, int], list[str]]:
        """Checkpoints of the mirror, as step and checksum of the manifest, and lines to print."""
        assert self._mirrored is not None
        there, held, notes = self._mirrored.mirror, dict[int, int](), list[str]()
        for step in there.steps():
            try:
                held[step] = read_meta(there.place(step)).manifest_crc32
            except DamagedError as error:
                unsteady.hold(error)
                done = "it is passed over" if error.unread else f"{there.quarantine(step)} is put aside"
                notes.append(f"{error}; {done}")
        return held, notes

    def _manifest(self, step: int, seal: int, notes: list[str]) -> Manifest | None:
        """Manifest of a checkpoint on this disk; None if missing or damaged. Damage quarantines the checkpoint."""
        path = directory.step_path(self._folder, step)
        try:
            if directory.is_checkpoint(path) and read_meta(path).manifest_crc32 == seal:
                return open_checkpoint(path)[1]
        except DamagedError as error:
            notes.append(f"{error}; {_quarantine(path, error)}")
        return None


def _quarantine(path: Path, error: DamagedError) -> str:
    """Quarantine a damaged checkpoint, but not an unreadable one; return a description for people."""
    unsteady.hold(error)
    return "it is passed over" if error.unread else f"it is put aside as {directory.quarantine(path).name}"
