"""A run goes on only as what it was: whatever has drifted is refused by its name, with both values, unless allowed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nxtrain.checkpoint.meta import Meta, fingerprint
from nxtrain.common.errors import CheckpointError
from nxtrain.config.check import Resolved
from nxtrain.train import compatibility
from nxtrain.train.compatibility import RunInputs, changes, meta_at, refuse_drift
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
    data = {"source": "tokens", "path": "rows.npy", **tables.pop("data", {})}
    return run_plan(folder, data, steps=4, run=run_dir, **tables)


def hold(
    folder: Path, tokenizer: Path, drifted: tuple[str, ...], allowed: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Save after two steps, let some things drift, and ask whether the run may go on."""
    there: Meta = meta_at(2, planned(folder), RunInputs.of("rows", tokenizer))
    plan = planned(folder, *(DRIFTED[key] for key in drifted), allowed=allowed)
    if "tokenizer" in drifted:
        tokenizer.write_text('{"a": 1}', encoding="utf-8")
    if "code" in drifted:
        monkeypatch.setattr(compatibility, "_fingerprint_of", lambda *packages: "of other files")
    inputs = RunInputs.of("other rows" if "data" in drifted else "rows", tokenizer)
    refuse_drift(folder / "step-00000002", there, meta_at(0, plan, inputs), plan)


@pytest.mark.parametrize("key", compatibility.DRIFT)
def test_what_has_drifted_is_refused_by_its_key_and_allowed_by_it(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    others = tuple(other for other in compatibility.DRIFT if other != key)
    with pytest.raises(CheckpointError) as refused:
        hold(tmp_path, tokenizer, (key,), others, monkeypatch)
    assert SAID[key] in str(refused.value)
    assert not [said for other, said in SAID.items() if other != key and said in str(refused.value)]
    assert f'"{key}"' in str(refused.value).partition("allow_drift=")[2]
    tokenizer.write_text("{}", encoding="utf-8")
    monkeypatch.undo()
    hold(tmp_path, tokenizer, (key,), (key,), monkeypatch)


@settings(max_examples=20, deadline=None)
@given(changed=st.sets(st.sampled_from(["vocab_size", "hidden_size", "num_hidden_layers", "rope_theta"]), min_size=1))
def test_of_another_shape_only_the_differing_keys_are_named(changed: set[str]) -> None:
    here = meta_at(
        0, run_plan(Path("run"), {"source": "tokens", "path": "rows.npy"}, steps=4), RunInputs.of("rows", None)
    )
    other = {**here.config, **{key: 2 * here.config[key] for key in changed}}
    with pytest.raises(CheckpointError) as refused:
        refuse_drift(
            Path("step-00000002"),
            here.model_copy(update={"config": other}),
            here,
            run_plan(Path("run"), {"source": "tokens", "path": "rows.npy"}, steps=4),
        )
    named = set(re.findall(r"config\.(\w+) is ", str(refused.value)))
    assert named == changed
    for key in changed:
        assert f"config.{key} is {2 * here.config[key]!r} there and {here.config[key]!r} here" in str(refused.value)


def test_another_order_of_the_rows_is_held_as_other_data(tmp_path: Path) -> None:
    there = meta_at(2, planned(tmp_path), RunInputs.of("rows", None))
    assert there.shuffle is True

    def hold_to(meta: Meta, *allowed: str) -> None:
        plan = planned(tmp_path, {"data": {"shuffle": False}}, allowed=allowed)
        refuse_drift(tmp_path / "step-00000002", meta, meta_at(0, plan, RunInputs.of("rows", None)), plan)

    with pytest.raises(CheckpointError, match=r"data.shuffle is True there and False here.*allow_drift=\[\"data\"\]"):
        hold_to(there)
    hold_to(there, "data")
    hold_to(there.model_copy(update={"shuffle": None}))


def test_settings_that_move_the_course_are_told_and_not_refused(tmp_path: Path) -> None:
    there = meta_at(2, planned(tmp_path), RunInputs.of("rows", None))
    there = Meta.model_validate_json(there.model_dump_json())

    def refusal(*sections: Mapping[str, Mapping[str, Any]], meta: Meta = there) -> str:
        plan = planned(tmp_path, *sections)
        fresh = meta_at(0, plan, RunInputs.of("rows", None))
        refuse_drift(tmp_path / "step-00000002", meta, fresh, plan)
        return changes(meta, fresh)

    assert refusal() == ""
    assert refusal({"optim": {"lr": 1e-5}}) == "settings have changed since step 2: optim.lr 0.01 there, 1e-05 here"
    assert refusal({"backend": {"deterministic": True}}).endswith("backend.deterministic False there, True here")
    assert refusal({"data": {"doc_mask": True}}).endswith(": data.doc_mask False there, True here")
    assert refusal({"model": {"moe_z_loss": 0.1}}).endswith(": model.moe_z_loss 0.0 there, 0.1 here")
    assert "model.moe_dispatch dropless there, capacity here" in refusal({"model": {"moe_dispatch": "capacity"}})
    assert refusal({"train": {"steps": 9}}) == "settings have changed since step 2: optim.decay_steps 4 there, 9 here"
    assert refusal({"train": {"steps": 9}, "optim": {"decay_steps": 4}}) == ""
    assert "precision.reduce fp32 there, bf16 here" in refusal({"precision": {"reduce": "bf16"}})
    assert refusal({"optim": {"lr": 1e-5}}, meta=there.model_copy(update={"settings": {}})) == ""
    other = there.model_copy(update={"settings": {**there.settings, "torch": "1.0"}})
    assert f"torch 1.0 there, {torch.__version__} here" in refusal(meta=other)


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
        return fingerprint(compatibility._sources(["trains"]))

    before = seen()
    assert seen() == before
    (package / "notes.txt").write_text("of no consequence", encoding="utf-8")
    assert seen() == before
    (package / "a.py").write_text("x = 2\n", encoding="utf-8")
    changed = seen()
    (package / "a.py").rename(package / "b.py")
    assert len({before, changed, seen()}) == 3


def test_code_is_read_once_since_later_changes_are_not_what_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = meta_at(2, planned(tmp_path), RunInputs.of("rows", None))
    monkeypatch.setattr(compatibility, "_sources", lambda packages: [b"edited while the run goes on"])
    second = meta_at(4, planned(tmp_path), RunInputs.of("rows", None))
    assert first.code_fingerprint == second.code_fingerprint
    assert first.code_fingerprint != fingerprint([b"edited while the run goes on"])
