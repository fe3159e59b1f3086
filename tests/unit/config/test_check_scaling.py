"""Scalings of the rotary embedding as overrides of a preset, and mistakes in them."""

from __future__ import annotations

from pathlib import Path

from tests.unit.config.test_check import checked, only, problems


def test_a_scaling_that_names_its_type_replaces_that_of_the_preset(tmp_path: Path) -> None:
    override = 'model.config.rope_scaling={rope_type="linear", factor=2}'
    resolved = checked(tmp_path, "model.preset=llama3.1-8b", override)
    assert resolved.model.model_dump()["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    assert checked(tmp_path, override, "model.config.rope_scaling.factor=4").model.model_dump()["rope_scaling"] == {
        "rope_type": "linear",
        "factor": 4.0,
    }


def test_mistakes_in_a_scaling_have_full_keys_and_nearest_names(tmp_path: Path) -> None:
    overrides = [f"model.config.rope_scaling.{entry}" for entry in ("rope_type=yarn", "factor=many", "beta_fats=2")]
    errors = {problem.key.rpartition(".")[2]: problem for problem in problems(tmp_path, *overrides)}
    assert all(problem.key.startswith("model.config.rope_scaling.") for problem in errors.values())
    assert errors["factor"].reason == '"many" is a string, but a number is needed'
    assert errors["original_max_position_embeddings"].reason == "missing, and has no default"
    assert errors["beta_fats"].hint == "did you mean model.config.rope_scaling.beta_fast?"
    foreign = only(tmp_path, 'model.config.rope_scaling={rope_type="linear", factor=2, beta_fast=9}')
    assert (foreign.reason, foreign.hint) == ("unknown key", "model.config.rope_scaling of this type has no such key")
    assert only(tmp_path, "model.config.rope_scaling.rope_type=yarm").hint == "did you mean yarn?"
    assert only(tmp_path, "model.config.rope_scaling.factor=2").key == "model.config.rope_scaling.rope_type"
    assert only(tmp_path, "model.config.rope_scaling=2").reason == "2 is an integer, but a table is needed"
