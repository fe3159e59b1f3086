"""Which checkpoint a run continues, and where each rank reads it: on its node's disk, in the mirror, or in both."""

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
from nxtrain.checkpoint.rewinds import Records, Return
from nxtrain.config.schema import RunConfig
from nxtrain.distributed.agreement import Group, by_leader, gather, together
from nxtrain.errors import CheckpointError, DamagedError
from nxtrain.io.checksummed_file import verify
from nxtrain.io.object_store import Place, place_of
from nxtrain.io.read_retry import unsteady
from nxtrain.mesh import Mesh
from nxtrain.run_folder import CHECKPOINTS_DIR

T = TypeVar("T")

Say = Callable[[str], None]


@dataclass(frozen=True)
class Found:
    """A checkpoint.

    Args:
        place: Where this rank reads it.
        copies: Where it reads what is damaged or absent there.
    """

    place: Place
    copies: tuple[Place, ...] = ()


@dataclass(frozen=True)
class _Holding:
    """What a disk has of a checkpoint.

    Args:
        wanted: All files of ranks, if their list is there.
        present: Those of them that are there, with the right length.
    """

    wanted: tuple[str, ...] = ()
    present: tuple[str, ...] = ()


class Resumption:
    """Finds the checkpoint to continue, and puts damaged and left ones aside. Every rank makes one, and calls it alike.

    Args:
        config: Of the run.
        mirrored: Its mirror, if it has one.
        mesh: The axes of this rank.
        group: Group of all ranks that can carry host objects; None for the default group.
        say: Takes lines for people.
        restarted: An agent or a scheduler started the same command again, as far as this rank was told.
        job: Its name for what it starts again; empty if there is none.

    Attributes:
        own: The checkpoints are those of this run: damaged ones are put aside. Otherwise they are another's, or the run
            goes back on purpose.

    Raises:
        CheckpointError: The mirror, or a disk, is that of another run.
    """

    def __init__(
        self,
        config: RunConfig,
        mirrored: Mirrored | None,
        mesh: Mesh,
        group: Group,
        say: Say,
        *,
        restarted: bool,
        job: str = "",
    ) -> None:
        self._resume, self._folder = config.checkpoint.resume, config.run.dir / CHECKPOINTS_DIR
        self._mirrored, self._mesh, self._group, self._say = mirrored, mesh, group, say
        self._chosen: Found | None = None
        self._unread = set[int]()
        # One rank that was started again is enough: an agent that replaces another has started nothing before.
        told = gather((restarted, job), mesh, group)
        is_restart, self._job = any(again for again, _ in told), told[0][1]
        at_mirror = by_leader(self._aims_at_mirror, mesh, group, "cannot look for checkpoints")
        records = self._records = Records(config.run.dir, mirrored, mesh, group, takes_over=at_mirror)
        has_returned = records.newest.has_returned(self._resume, self._job)
        self.own = self._resume == "auto" or (is_restart and has_returned)
        if is_restart and not self.own and records.damaged:
            raise CheckpointError(
                f"{records.damaged[0]}; it would tell whether the run went back as checkpoint.resume={self._resume} "
                "says, or is still to. Start it anew with the same to go back, or with checkpoint.resume=auto to go on "
                "from its newest checkpoint"
            )
        self._tell(f"WARNING: {error}; it is written anew" for error in records.damaged)
        if self.own:
            self._tell_aside(records.put_aside_missed(), "the run went back where this was not seen")
        elif has_returned:  # by another start that told the same: no restart may take that for what this one tells
            known = len(records.newest.returns)
            records.add(Return(told="", job=self._job))
            records.write(known)

    def choose(self) -> Found | None:
        """The checkpoint to continue; None: start from scratch.

        Raises:
            CheckpointError: There is none at the path that was asked for; or there were some, and all are damaged.
        """
        self._chosen = self._newest_own() if self.own else None
        if self._chosen is not None or self._resume == "auto":
            return self._chosen
        if self.own:
            self._say(f"nothing that the run reached since is left: it goes back to {self._resume} again")
        self.own = False
        if self._resume != "never":
            self._chosen = Found(
                by_leader(lambda: mirror.resolve(self._resume), self._mesh, self._group, "cannot look for checkpoints")
            )
        return self._chosen

    def put_aside(self, found: Found, error: DamagedError) -> str:
        """Put a damaged checkpoint where nobody takes it, and tell what was done.

        One that cannot be read stays where it is until the one before it was: both unread would be the storage.
        """
        failure = f"cannot put aside {found.place}"
        if by_leader(lambda: error.unread, self._mesh, self._group, failure):
            self._unread.add(int(found.place.name.removeprefix("step-")))
            return "the one before it is tried"
        if self._mirrored is None:
            assert isinstance(found.place, Path)
            path = found.place
            aside = by_leader(lambda: directory.quarantine(path), self._mesh, self._group, failure).name
            return f"the checkpoint is put aside as {aside}, and the one before it is tried"
        step = int(found.place.name.removeprefix("step-"))
        local, there = directory.step_path(self._folder, step), self._mirrored.mirror
        self._mirrored.disk.on_each(
            lambda: directory.is_checkpoint(local) and directory.quarantine(local), self._mesh, self._group, failure
        )
        by_leader(lambda: step in there.steps() and there.put_aside(step), self._mesh, self._group, failure)
        return f"step {step} is put aside on disks and in {there}, and the one before it is tried"

    def begin(self) -> None:
        """Go on from what was chosen and was loaded: put aside what is no part of the run from there on, and note that.

        In this order: where it is cut off before the note, a restart goes back again.
        """
        keeps, in_folder, in_mirror = by_leader(
            self._keeps, self._mesh, self._group, f"cannot look for checkpoints in {self._folder}"
        )
        gone = list[int]()
        if not self.own:  # a disk that was away may be so on purpose: it holds what is gone back to
            gone += self._records.put_aside_missed(on_disks=not in_folder, in_mirror=not in_mirror)
            self._records.add(Return(told=self._resume, job=self._job, keeps=keeps))
        gone += self._records.put_aside(keeps, damaged=not self.own)
        where = self._chosen.place if self._chosen else "scratch"
        self._tell_aside(sorted({*gone}), f"the run goes on from {where}")
        self._records.write()

    def _keeps(self) -> tuple[int, bool, bool]:
        """The last step that stays part of the run, and whether what was chosen lies in its folder or in its mirror."""
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
        place = by_leader(self._newest_here, self._mesh, self._group, "cannot look for checkpoints")
        return Found(place) if place is not None else None

    def _newest_here(self) -> Path | None:
        for found in reversed(directory.list_checkpoints(self._folder)):
            if directory.step_of(found) not in self._unread and self._is_own(directory.step_of(found)):
                return found
        self._refuse_scratch([path.name for path in directory.quarantined(self._folder)])
        return None

    def _is_own(self, step: int) -> bool:
        """A run that is told to start from scratch leaves a conversion of step 0 in its place, and does not take it."""
        return step > 0 or self._resume != "never"

    def _tell_aside(self, steps: list[int], why: str) -> None:
        if steps:
            named = ", ".join(directory.step_path(Path(), step).name for step in steps)
            self._say(f"{why}: put aside as abandoned, since no part of it any more: {named}")

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
        copied = by_leader(self._mirror_held, self._mesh, self._group, f"cannot look for checkpoints in {there}")
        self._tell(copied[1])
        # Where the same step was written twice, what lies on disks is the later one.
        candidates = {
            (step, copied[0].get(step) != seal, seal)
            for held in (*here, copied[0])
            for step, seal in held.items()
            if step not in self._unread and self._is_own(step)
        }
        for step, only_here, seal in sorted(candidates, reverse=True):
            if not only_here or self._complete(mirrored, step, seal):
                return self._found(mirrored, step, seal, only_here=only_here and mirrored.disk.number == 1)
        aside = self._on_disks(lambda notes: [path.name for path in directory.quarantined(self._folder)], list[str]())
        spoilt = by_leader(there.spoilt, self._mesh, self._group, f"cannot look for checkpoints in {there}")
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
        """Whether the disks together hold a checkpoint that the mirror lacks; several disks bring it there first."""
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
            self._tell([f"step {step} is not in {there}, and {reason}; the one before it is tried"])
            return False
        if mirrored.disk.number == 1:
            return True

        def check() -> None:
            for name in holdings[self._mesh.rank].present:
                if holders[name] == self._mesh.rank and manifest is not None:
                    verify(path / name, manifest.files[name].stored)

        def add() -> None:
            for name in holdings[self._mesh.rank].present:
                if holders[name] == self._mesh.rank and manifest is not None:
                    there.add(step, path / name, manifest.files[name].stored)

        def finish() -> None:
            if self._mesh.rank == sealers[0]:
                there.finish(step, path)

        failure = f"cannot copy {path.name} to {there}, and nodes cannot read each other's disks"
        try:
            together(check, self._mesh, self._group, failure)  # before a copy of the same step makes room
        except DamagedError as error:
            unsteady.hold(error)
            self._tell([f"WARNING: {error}; step {step} is not in {there}, so that the one before it is tried"])
            return False
        # What fails from here on is no damage: to go back for it would leave what the disks hold for good.
        by_leader(lambda: there.begin(step), self._mesh, self._group, failure)
        together(add, self._mesh, self._group, failure)
        together(finish, self._mesh, self._group, failure)
        return True

    def _on_disks(self, action: Callable[[list[str]], T], otherwise: T) -> list[T]:
        """Let the leader of each disk act, and give what each rank has then; what they note is told."""
        assert self._mirrored is not None
        leads, notes, mine = self._mirrored.disk.leads, list[str](), [otherwise]

        def act() -> None:
            if leads:
                mine[0] = action(notes)

        together(act, self._mesh, self._group, f"cannot look for checkpoints in {self._folder}")
        found = gather((mine[0], notes), self._mesh, self._group)
        self._tell([note for _, noted in found for note in noted])
        return [result for result, _ in found]

    def _tell(self, notes: Iterable[str]) -> None:
        for note in notes:
            self._say(note)

    def _held(self, notes: list[str]) -> dict[int, int]:
        """The checkpoints of this disk, as step and checksum of the manifest; damaged ones are put aside."""
        held = {}
        for path in directory.list_checkpoints(self._folder):
            try:
                held[directory.step_of(path)] = read_meta(path).manifest_crc32
            except DamagedError as error:
                notes.append(f"{error}; {_quarantine(path, error)}")
        return held

    def _mirror_held(self) -> tuple[dict[int, int], list[str]]:
        """The same of the mirror, and what is to be told."""
        assert self._mirrored is not None
        there, held, notes = self._mirrored.mirror, dict[int, int](), list[str]()
        for step in there.steps():
            try:
                held[step] = read_meta(there.place(step)).manifest_crc32
            except DamagedError as error:
                unsteady.hold(error)
                what = "it is passed over" if error.unread else f"{there.put_aside(step)} is put aside"
                notes.append(f"{error}; {what}")
        return held, notes

    def _manifest(self, step: int, seal: int, notes: list[str]) -> Manifest | None:
        """The manifest of a checkpoint of this disk, if it is there; it is put aside if that is damaged."""
        path = directory.step_path(self._folder, step)
        try:
            if directory.is_checkpoint(path) and read_meta(path).manifest_crc32 == seal:
                return open_checkpoint(path)[1]
        except DamagedError as error:
            notes.append(f"{error}; {_quarantine(path, error)}")
        return None


def _quarantine(path: Path, error: DamagedError) -> str:
    """Put a checkpoint aside if it is damaged, and tell what was done; one that cannot be read is passed over."""
    unsteady.hold(error)
    return "it is passed over" if error.unread else f"it is put aside as {directory.quarantine(path).name}"
