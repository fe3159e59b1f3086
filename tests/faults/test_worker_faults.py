"""Data workers that are killed or stopped change no number of a run, or end it with their name; none outlives it."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from nxtrain.common.errors import WorkerError
from tests.support.commands import train, trained, write_config
from tests.support.corpora import documents, prepare, write_corpus, write_tokenizer
from tests.support.runs import course

STEPS, VOCABULARY = 12, 300


def configured(folder: Path, *overrides: str) -> tuple[str, ...]:
    """A run of one rank on a corpus of text, whose overrides it returns."""
    write_config(folder, steps=STEPS, every=4)
    prepare(write_corpus(folder / "src", "a.jsonl", documents(40)), out=folder / "o.arrow")
    tokenizer = write_tokenizer(folder / "tokenizer", VOCABULARY)
    data = ("source=arrow", f"path={folder}/o.arrow", f"tokenizer={tokenizer}", "packing=best_fit")
    return (f"model.config.vocab_size={VOCABULARY}", *(f"data.{override}" for override in data), *overrides)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The records of a run whose rows the rank makes itself."""
    folder = tmp_path_factory.mktemp("undisturbed")
    trained(folder, *configured(folder, "data.workers=0"))
    return course(folder / "run")


def named(output: str) -> set[int]:
    """Processes of the workers that a run reports."""
    return {int(pid) for pid in re.findall(r"data worker \d of rank 0 \(process (\d+)\)", output)}


def test_killed_and_stopped_workers_are_replaced_and_no_number_changes(
    tmp_path: Path, undisturbed: list[dict[str, Any]]
) -> None:
    overrides = configured(tmp_path, "recovery.hang_timeout_s=5")
    output = trained(tmp_path, *overrides, armed="killworker@0:2:worker:1,stopworker@0:5:worker:0")
    assert course(tmp_path / "run") == undisturbed
    flat = " ".join(output.split())
    assert "was ended by SIGKILL, before its rows of step" in flat
    assert "has not answered for 1 seconds, before its rows of step" in flat
    assert f"it was reading {tmp_path}/o.arrow, document " in flat
    pids = named(flat)
    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_worker_that_dies_ends_a_run_that_allows_none_and_the_next_start_goes_on(
    tmp_path: Path, undisturbed: list[dict[str, Any]]
) -> None:
    overrides = configured(tmp_path, "data.worker_restarts=0")
    armed = "killworker@0:6:worker"
    code, output = train(tmp_path, *overrides, armed=armed)
    assert code == WorkerError.exit_code, output
    assert code != -signal.SIGKILL
    flat = " ".join(output.split())
    assert "data worker 0 of rank 0 (process " in flat
    assert "data.worker_restarts=0 allows no further replacement" in flat
    assert "Traceback" not in output
    assert len(course(tmp_path / "run")) < STEPS
    trained(tmp_path, *overrides, armed=armed)
    assert course(tmp_path / "run") == undisturbed
