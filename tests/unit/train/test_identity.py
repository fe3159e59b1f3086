"""A run goes on only as what it was: whatever has drifted is refused by its name, with both values, unless allowed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from nxtrain.checkpoint.meta import Meta
from nxtrain.config.check import Resolved
from nxtrain.errors import CheckpointError
from nxtrain.train import identity
from nxtrain.train.identity import Inputs, meta_at, refuse_drift
from tests.support.runs import run_plan

HERE: dict[str, Any] = {"run": {"seed": 0}, "train": {"global_batch": 4}}
DRIFTED: dict[str, dict[str, Any]] = {
    "seed": {"run": {"seed": 7}},
    "batch": {"train": {"global_batch": 8}},
    "tokenizer": {},
    "data": {},
    "code": {},
}
SAID = {
    "seed": "run.seed is 0 there and 7 here",
    "batch": "train.global_batch is 4 there and 8 here",
    "tokenizer": "the tokenizer's fingerprint is ",
    "data": "the data's fingerprint is ",
    "code": "the code's fingerprint is ",
}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    file = tmp_path / "tokenizer.json"
    file.write_text("{}", encoding="utf-8")
    return file


def planned(folder: Path, *sections: Mapping[str, Mapping[str, Any]], allowed: tuple[str, ...] = ()) -> Resolved:
    tables: dict[str, dict[str, Any]] = {"checkpoint": {"allow_drift": list(allowed)}}
    for section in (HERE, *sections):
        for name, table in section.items():
            tables[name] = {**tables.get(name, {}), **table}
    run_dir = {"dir": folder, **tables.pop("run")}
    return run_plan(folder, {"source": "tokens", "path": "rows.npy"}, steps=4, run=run_dir, **tables)


def hold(
    folder: Path, tokenizer: Path, drifted: tuple[str, ...], allowed: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Save after two steps, let some things drift, and ask whether the run may go on."""
    there: Meta = meta_at(2, planned(folder), Inputs.of("rows", tokenizer))
    plan = planned(folder, *(DRIFTED[key] for key in drifted), allowed=allowed)
    if "tokenizer" in drifted:
        tokenizer.write_text('{"a": 1}', encoding="utf-8")
    if "code" in drifted:
        sources = list(identity._sources(["nxtrain"]))
        monkeypatch.setattr(identity, "_sources", lambda packages: [*sources[:-1], sources[-1] + b"\n"])
    inputs = Inputs.of("other rows" if "data" in drifted else "rows", tokenizer)
    refuse_drift(folder / "step-00000002", there, meta_at(0, plan, inputs), plan)


@pytest.mark.parametrize("key", identity.DRIFT)
def test_what_has_drifted_is_refused_by_its_key_and_allowed_by_it(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    others = tuple(other for other in identity.DRIFT if other != key)
    with pytest.raises(CheckpointError) as refused:
        hold(tmp_path, tokenizer, (key,), others, monkeypatch)
    assert SAID[key] in str(refused.value)
    assert not [said for other, said in SAID.items() if other != key and said in str(refused.value)]
    assert f'"{key}"' in str(refused.value).partition("allow_drift=")[2]
    tokenizer.write_text("{}", encoding="utf-8")
    monkeypatch.undo()
    hold(tmp_path, tokenizer, (key,), (key,), monkeypatch)


def test_all_that_has_drifted_is_told_at_once(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError) as refused:
        hold(tmp_path, tokenizer, tuple(DRIFTED), (), monkeypatch)
    assert all(said in str(refused.value) for said in SAID.values())


def test_a_run_that_is_what_it_was_goes_on(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hold(tmp_path, tokenizer, (), (), monkeypatch)


def test_code_is_known_by_the_names_and_the_contents_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "trains"
    package.mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    (package / "__init__.py").touch()
    (package / "a.py").write_text("x = 1\n", encoding="utf-8")
    __import__("trains")

    def seen() -> str:
        return identity._digest(identity._sources(["trains"]))

    before = seen()
    assert seen() == before
    (package / "notes.txt").write_text("of no consequence", encoding="utf-8")
    assert seen() == before
    (package / "a.py").write_text("x = 2\n", encoding="utf-8")
    changed = seen()
    (package / "a.py").rename(package / "b.py")
    assert len({before, changed, seen()}) == 3
