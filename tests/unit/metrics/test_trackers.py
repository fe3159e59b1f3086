"""Weights & Biases and MLflow without network: real runs into files, where their packages are installed."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from nxtrain.common.errors import BackendError
from nxtrain.config.schema import RunConfig
from nxtrain.metrics import trackers
from nxtrain.metrics.sinks import open_sinks
from tests.support.processes import free_port, patient_s

RECORDS: list[dict[str, Any]] = [
    {"step": 1, "loss": 2.5, "alarm": "spike: loss", "mfu": None},
    {"step": 2, "loss": math.nan, "grad_norm": 0.5},
    {"step": 3, "loss": 2.25},
]


def config(folder: Path, **metrics: Any) -> RunConfig:
    tables = {"run": {"dir": str(folder), "name": "demo"}, "train": {"steps": 3}}
    return RunConfig.model_validate({**tables, "metrics": {"tensorboard": False, "progress": False, **metrics}})


def log(run: RunConfig, records: list[dict[str, Any]], resume_step: int = 0) -> None:
    sinks = open_sinks(run, resume_step, leader=True)
    for record in records:
        for sink in sinks:
            sink.log(record)
    for sink in sinks:
        sink.close()


def test_a_tracker_whose_package_is_absent_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package, given in (("wandb", {"wandb": "offline"}), ("mlflow", {"mlflow": "file:x"})):
        monkeypatch.setitem(__import__("sys").modules, package, None)
        with pytest.raises(BackendError, match=rf"pip install 'nxtrain\[{package}\]', or leave metrics.{package} out"):
            open_sinks(config(tmp_path, **given), 0, leader=True)


def test_a_tracker_that_fails_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Failing:
        def __init__(self, *args: object) -> None:
            with trackers._as_os_error("wandb"):
                raise ValueError("the server is gone")

    monkeypatch.setattr(trackers, "WandbSink", Failing)
    monkeypatch.setattr(trackers, "require", lambda *names: None)
    log(config(tmp_path, wandb="offline"), RECORDS)
    said = " ".join(capsys.readouterr().err.split())
    assert "Weights & Biases cannot be written: wandb: ValueError: the server is gone; training goes on" in said
    assert "3 records are missing in Weights & Biases" in said


def test_an_identity_is_made_once(tmp_path: Path) -> None:
    assert trackers.identity(tmp_path, lambda: "first") == "first"
    assert trackers.identity(tmp_path, lambda: "second") == "first"


def blocks(content: bytes) -> Iterator[bytes]:
    """Whole records of a file of Weights & Biases: LevelDB's log format behind seven bytes."""
    at = 7
    while at + 7 <= len(content):
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        assert kind == 1, "not the part of a record"
        at += 7 + length
        if at <= len(content):  # else the last is being written
            yield content[at - length : at]


def histories(file: Path) -> Iterator[dict[str, float]]:
    """Rows of a run in a file of Weights & Biases."""
    from wandb.proto import wandb_internal_pb2

    for content in blocks(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(content)
        if record.HasField("history"):
            items = {(item.key or item.nested_key[0]): item.value_json for item in record.history.item}
            yield {key: float(items[key]) for key in items if not key.startswith("_")}


@pytest.mark.filterwarnings("ignore")
def test_weights_and_biases_gets_every_record_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="no wandb: pip install 'nxtrain[wandb]'")
    run = config(tmp_path, wandb="offline")
    log(run, RECORDS[:2])
    log(run, RECORDS[2:], resume_step=2)
    files = sorted((tmp_path / "wandb").rglob("*.wandb"))
    assert len({file.name for file in files}) == 1, "of one run"
    limit_s = time.monotonic() + patient_s(60)  # a process of its own writes the files
    while len(logged := [row for file in files for row in histories(file)]) < len(RECORDS):
        assert time.monotonic() < limit_s, (files, logged)
        time.sleep(0.05)
        files = sorted((tmp_path / "wandb").rglob("*.wandb"))
    assert logged == [{"step": 1.0, "loss": 2.5}, {"step": 2.0, "grad_norm": 0.5}, {"step": 3.0, "loss": 2.25}]


def rows_below(folder: Path) -> list[dict[str, float]]:
    return [row for file in sorted(folder.rglob("*.wandb")) for row in histories(file)]


def log_and_wait(folder: Path, records: list[dict[str, Any]], resume_step: int) -> None:
    """Log records, tell so, and wait for the end."""
    sinks = open_sinks(config(folder, wandb="offline"), resume_step, leader=True)
    for record in records:
        for sink in sinks:
            sink.log(record)
    (folder / "logged").touch()
    time.sleep(600)


def kill_tree(pid: int) -> None:
    """Kill a process and its children at once, as a machine or a container that goes."""
    children = (Path(f"/proc/{pid}/task/{pid}/children")).read_text().split()
    os.kill(pid, signal.SIGKILL)
    for child in children:
        with suppress(ProcessLookupError):
            os.kill(int(child), signal.SIGKILL)


@pytest.mark.filterwarnings("ignore")
def test_what_a_kill_took_from_weights_and_biases_is_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step up to that of each resume is there, after two kills."""
    pytest.importorskip("wandb", reason="no wandb: pip install 'nxtrain[wandb]'")
    monkeypatch.delenv("WANDB_SERVICE", raising=False)  # of the tests, which would outlive the kill
    context, resume_step = multiprocessing.get_context("spawn"), 0
    for step in (3, 4):  # of the checkpoints after each kill
        records = [{"step": at, "loss": 1 / at} for at in range(resume_step + 1, step + 2)]
        process = context.Process(target=log_and_wait, args=(tmp_path, records, resume_step))
        process.start()
        limit_s = time.monotonic() + patient_s(60)
        while not (tmp_path / "logged").exists():
            assert time.monotonic() < limit_s
            assert process.is_alive()
            time.sleep(0.05)
        (tmp_path / "logged").unlink()
        assert process.pid is not None
        kill_tree(process.pid)
        process.join()
        resume_step = step
    last = {"step": resume_step + 1, "loss": 0.5}

    def log_to_the_end(record: dict[str, Any], resume_step: int) -> int:
        process = context.Process(target=log, args=(config(tmp_path, wandb="offline"), [record], resume_step))
        process.start()
        process.join(patient_s(60))
        assert process.exitcode == 0
        return len(rows_below(tmp_path))

    num_rows = log_to_the_end(last, resume_step)
    wanted = {float(step): 1 / step for step in range(1, resume_step + 1)} | {last["step"]: 0.5}
    assert {row["step"]: row["loss"] for row in rows_below(tmp_path)} == wanted
    # A start that ended leaves nothing to send again.
    assert log_to_the_end({"step": resume_step + 2, "loss": 0.25}, resume_step + 1) == num_rows + 1


@pytest.mark.filterwarnings("ignore")
def test_mlflow_gets_every_record_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="no mlflow: pip install 'nxtrain[mlflow]'")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    uri = (tmp_path / "store").as_uri()
    run = config(tmp_path, mlflow=uri)
    log(run, RECORDS[:2])
    log(run, RECORDS[2:], resume_step=2)
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("nxtrain")
    assert experiment is not None
    (result,) = client.search_runs([experiment.experiment_id])
    assert (result.info.run_name, result.info.status) == ("demo", "FINISHED")
    assert result.data.params["train.steps"] == "3"
    history = {
        key: [(m.step, m.value) for m in client.get_metric_history(result.info.run_id, key)]
        for key in result.data.metrics
    }
    assert history == {"step": [(1, 1), (2, 2), (3, 3)], "loss": [(1, 2.5), (3, 2.25)], "grad_norm": [(2, 0.5)]}


@pytest.mark.filterwarnings("ignore")
def test_an_mlflow_server_that_is_away_holds_no_step_for_long(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mlflow", reason="no mlflow: pip install 'nxtrain[mlflow]'")
    began = time.monotonic()
    log(config(tmp_path, mlflow=f"http://127.0.0.1:{free_port()}"), [{"step": 1, "loss": 1.0}])
    assert time.monotonic() - began < patient_s(10), "of MLflow's own attempts, the second waits for seconds"
    said = " ".join(capsys.readouterr().err.split())
    assert "warning: MLflow cannot be written: mlflow: MlflowException: API request to" in said
    assert "warning: 1 records are missing in MLflow, which could not be written" in said


def test_mlflow_takes_records_with_any_name_of_a_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A corpus is named by its path or address if the name of its file is not unique."""
    pytest.importorskip("mlflow", reason="no mlflow: pip install 'nxtrain[mlflow]'")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    names = [
        "c++",
        "web(1)",
        "/data/web.arrow",
        "s3://b/web.arrow",
        "../web.arrow",
        "a/../b",
        "a\u4e16",
        "x" * 400,
        "c__",
    ]
    record = {f"tokens/{name}": float(number) for number, name in enumerate(names, 1)}
    uri = (tmp_path / "store").as_uri()
    log(config(tmp_path, mlflow=uri), [{"step": 1, **record}])
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("nxtrain")
    assert experiment is not None
    (result,) = client.search_runs([experiment.experiment_id])
    values = {name: value for name, value in result.data.metrics.items() if name != "step"}
    assert sorted(values.values()) == sorted(record.values())
    assert values["tokens/data/web.arrow"] == record["tokens//data/web.arrow"]
    assert values["tokens/c__ 2"] == record["tokens/c__"]
