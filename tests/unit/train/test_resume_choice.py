"""Checkpoint from which a start resumes: by default, by `checkpoint.resume`, and after a restart by an agent."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nxtrain.checkpoint import directory, rewinds
from nxtrain.checkpoint.async_writer import CheckpointWriter, Destination
from nxtrain.checkpoint.directory import Retention
from nxtrain.checkpoint.mirror import Mirror, Mirrored
from nxtrain.checkpoint.mirror_uploads import MirrorUploader, UploadDeadline
from nxtrain.checkpoint.resume import ResumePlanner
from nxtrain.common.distributed.agreement import Ranks, StorageScope
from nxtrain.common.errors import CheckpointError
from nxtrain.common.io.object_store import FolderStore
from nxtrain.common.mesh import Mesh
from nxtrain.common.run_folder import CHECKPOINTS_DIR
from nxtrain.common.sharding import Layout, ParamTable, ShardSpec
from nxtrain.config.schema import RunConfig
from tests.support.run_folders import meta

CUT = Layout(ParamTable({"a.weight": ShardSpec((4, 2), dim=0)}), Mesh(1, 0))
ALONE = Ranks(Mesh(1, 0))
RANK_FILE = "rank-00000.safetensors"


class Run:
    def __init__(self, folder: Path, mirror: Path | None = None, name: str = "run") -> None:
        self.dir, self.mirror, self.said = folder / name, mirror, list[str]()
        self.folder = self.dir / CHECKPOINTS_DIR
        self.mirrored = Mirrored(Mirror(FolderStore(mirror)), StorageScope(ALONE)) if mirror else None

    def start(
        self, resume: str | Path = "auto", *, restarted: bool = False, job: str = "", killed: bool = False
    ) -> Path | None:
        """Checkpoint that a start chooses; a killed start has chosen and done nothing else."""
        config = RunConfig.model_validate({"run": {"dir": self.dir}, "checkpoint": {"resume": str(resume)}})
        self.said.clear()
        planner = ResumePlanner(config, self.mirrored, ALONE, self.said.append, restarted=restarted, job=job)
        sources = planner.choose()
        if not killed:
            planner.begin()
        if not sources:
            return None
        assert isinstance(sources[0], Path)
        return sources[0]

    def save(self, *steps: int, mirrored: bool = True) -> None:
        to = Destination(self.folder, StorageScope(ALONE), Retention(9))
        copied = self.mirrored if mirrored else None
        uploader = MirrorUploader(copied.mirror, to.retention, ALONE) if copied else None
        saver = CheckpointWriter(to, CUT, ALONE, background=False, uploader=uploader)
        for step in steps:
            saver.save(lambda step=step: {"model": {"a.weight": torch.full((4, 2), step)}}, meta(step))  # type: ignore[misc]
        saver.drain(UploadDeadline(20.0))

    def at(self, step: int) -> Path:
        return directory.step_path(self.folder, step)

    def copy(self, step: int) -> Path:
        assert self.mirror is not None
        return directory.step_path(self.mirror, step)

    def steps(self) -> list[int]:
        return [directory.step_of(path) for path in directory.list_checkpoints(self.folder)]

    def mirror_steps(self) -> list[int]:
        assert self.mirror is not None
        return [directory.step_of(path) for path in directory.list_checkpoints(self.mirror)]

    def move_disk(self, to: Path) -> None:
        """Another node takes its place; what the first one's disk has is elsewhere."""
        self.dir.rename(to)


def make(path: Path, step: int) -> Path:
    path.mkdir(parents=True)
    (path / directory.META).write_text(meta(step).sealed())
    return path


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.fixture
def far(tmp_path: Path) -> Run:
    return Run(tmp_path, tmp_path / "mirror")


@pytest.mark.parametrize("resume", ["auto", "never", "path"])
def test_a_restart_goes_on_from_what_the_run_has_reached(run: Run, tmp_path: Path, resume: str) -> None:
    other = make(directory.step_path(tmp_path / "other", 500), 500)
    requested = str(other) if resume == "path" else resume
    first = {"auto": None, "never": None, "path": other}[resume]
    assert run.start(requested) == first
    assert run.start(requested, restarted=True) == first, "it has reached nothing yet"
    make(run.at(600), 600)
    assert run.start(requested, restarted=True) == run.at(600)
    assert run.steps() == [600]


def test_a_run_that_goes_back_leaves_nothing_that_would_be_taken_for_its_own(run: Run) -> None:
    for step in (300, 500, 800, 900):
        make(run.at(step), step)
    assert run.start(run.at(500)) == run.at(500)
    assert run.steps() == [300, 500]
    (line,) = run.said
    assert line.startswith(f"the run goes on from {run.at(500)}: put aside as abandoned")
    assert line.endswith("step-00000800, step-00000900")
    make(run.at(600), 600)
    assert run.start() == run.at(600)
    assert run.said == []


@pytest.mark.parametrize("resume", ["never", "step-4"])
def test_a_restart_of_a_start_that_was_killed_before_it_went_back_goes_back(run: Run, resume: str) -> None:
    run.start()
    run.save(4, 8, 12)
    back = None if resume == "never" else run.at(4)
    requested = resume if back is None else back
    assert run.start(requested, killed=True) == back
    assert run.start(requested, restarted=True) == back
    assert run.steps() == ([4] if back else [])
    run.save(6)
    assert run.start(requested, restarted=True) == run.at(6)


@pytest.mark.parametrize("resume", ["never", "path", "own"])
def test_a_node_that_is_replaced_goes_on_from_the_mirror(far: Run, tmp_path: Path, resume: str) -> None:
    far.start()
    far.save(4, 8)
    other = make(directory.step_path(tmp_path / "other", 2), 2)
    requested = {"never": "never", "path": str(other), "own": str(far.copy(4))}[resume]
    far.start(requested)
    far.save(6)
    far.move_disk(tmp_path / "lost")
    assert far.start(requested, restarted=True) == far.copy(6)
    assert far.mirror_steps() == ([4, 6] if resume == "own" else [6])


def test_a_disk_that_was_away_while_the_run_went_back_holds_nothing_of_it(far: Run, tmp_path: Path) -> None:
    far.start()
    far.save(4, 8)
    far.save(12)
    far.move_disk(tmp_path / "first")
    assert far.start(far.copy(4)) == far.copy(4)
    far.save(6)
    far.move_disk(tmp_path / "second")
    (tmp_path / "first").rename(far.dir)
    assert far.start(killed=True) == far.copy(6)
    assert far.said == [
        "the run went back where this was not seen: put aside as abandoned, since no part of it any more: "
        "step-00000008, step-00000012"
    ]
    assert far.start() == far.copy(6)
    assert (far.steps(), far.mirror_steps()) == ([4], [4, 6])
    far.save(8)
    assert far.start() == far.at(8), "it is one of the run now"


def test_a_mirror_of_another_run_is_refused(far: Run, tmp_path: Path) -> None:
    far.start()
    far.save(8)
    other = Run(tmp_path, far.mirror, name="other")
    for resume in ("auto", "never"):
        with pytest.raises(CheckpointError) as refused:
            other.start(resume)
        for part in (f"mirror={far.mirror} belongs to another", f"run.dir={far.dir}", f"run.dir={other.dir}"):
            assert part in str(refused.value)
        assert f"checkpoint.resume={far.mirror} to continue" in str(refused.value)
    assert far.mirror_steps() == [8]
    assert far.start() == far.at(8)
    assert far.mirror is not None
    assert other.start(far.mirror) == far.copy(8)
    other.save(10)
    assert other.start() == other.at(10)
    with pytest.raises(CheckpointError, match="belongs to another run"):
        far.start()


def test_a_run_whose_folder_was_moved_keeps_its_mirror(far: Run, tmp_path: Path) -> None:
    far.start()
    far.save(4)
    far.move_disk(tmp_path / "moved")
    moved = Run(tmp_path, far.mirror, name="moved")
    assert moved.start() == moved.at(4)
    moved.move_disk(tmp_path / "lost")
    assert moved.start() == far.copy(4), "the mirror knows where the run lies now"


def test_what_is_later_than_the_step_gone_on_from_is_put_aside(far: Run) -> None:
    far.start()
    far.save(4)
    far.save(8, 12, 16, mirrored=False)
    for step in (8, 12, 16):
        (far.at(step) / RANK_FILE).write_bytes(b"torn")
    assert far.start() == far.at(4)
    assert far.steps() == [4]
    assert far.said[-1] == (
        f"the run goes on from {far.at(4)}: put aside as abandoned, since no part of it any more: "
        "step-00000008, step-00000012, step-00000016"
    )
    far.save(6)
    directory.prune(far.folder, Retention(keep=1))
    assert far.steps() == [4, 6]


@pytest.mark.parametrize("copy", ["disk", "mirror"])
def test_a_damaged_record_is_written_anew_from_the_other(far: Run, copy: str) -> None:
    far.start("never")
    far.save(4)
    file = (far.folder if copy == "disk" else far.mirrored.mirror.store.root) / rewinds.FILE  # type: ignore[union-attr]
    assert isinstance(file, Path)
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b'"keeps": 0', b'"keeps": 1'))
    with_record = far.start("auto")
    assert with_record == far.at(4)
    assert far.said[0].startswith(f"WARNING: {file} is damaged: its checksum does not match its content")
    assert file.read_bytes() == whole


def test_a_mirror_that_takes_nothing_is_no_reason_to_go_back(far: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two disks, neither of which can be read by the other's ranks."""
    assert far.mirrored is not None
    far.start()
    far.save(2)
    far.save(4, mirrored=False)
    far.mirrored = Mirrored(far.mirrored.mirror, StorageScope(ALONE, number=2))

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(far.mirrored.mirror, "add", full)
        with pytest.raises(CheckpointError, match=r"cannot copy step-00000004 to .*No space left"):
            far.start()
    assert directory.list_checkpoints(far.folder) == [far.at(2), far.at(4)]
    assert far.start() == far.at(4)


def test_files_of_a_mirror_without_a_whole_checkpoint_are_no_reason_to_start_from_scratch(far: Run) -> None:
    far.start()
    far.save(2, 4)
    far.move_disk(far.dir.with_name("lost"))
    for step in (2, 4):
        (far.copy(step) / directory.META).unlink()
    with pytest.raises(CheckpointError, match="no complete checkpoint is left"):
        far.start()
    assert all((far.copy(step) / RANK_FILE).exists() for step in (2, 4))


def test_the_first_upload_that_was_killed_with_its_node_is_no_lost_checkpoint(far: Run) -> None:
    far.start()
    far.save(2)
    far.move_disk(far.dir.with_name("lost"))
    for name in (directory.META, directory.MANIFEST):
        (far.copy(2) / name).unlink()
    assert far.start() is None
