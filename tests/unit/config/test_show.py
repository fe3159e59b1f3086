"""Printed configurations read back equal; every key has a type, a default and a sentence."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxtrain.config.load import load, values
from nxtrain.config.schema import RunConfig
from nxtrain.config.show import dump, keys, to_json
from nxtrain.config.tables import toml_key, toml_value

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

scalars = st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(exclude_categories=["Cs"]))
names = st.text(st.characters(exclude_categories=["Cs"]))
tables = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(names, inner), max_leaves=8)


@given(names, tables)
def test_any_value_reads_back_as_it_was(name: str, value: object) -> None:
    assert tomllib.loads(f"{toml_key(name)} = {toml_value(value)}") == {name: value}


def test_a_dump_reads_back_equal_with_and_without_origins(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("", encoding="utf-8")
    loaded = load(
        path,
        [
            'run.name="a \\"b\\" # c\\n"',
            "run.dir=some where/\u00e9",
            "optim.betas=[0.1, 0.123456789012345]",
            "optim.eps=1e-30",
            "checkpoint.async=false",
            "parallel.pipeline_cuts=[3, 7]",
            "model.config.tie_word_embeddings=true",
            "model.config.rope_scaling={factor = 8.0}",
            'model.config.list=[1, [2.5, "x"]]',
        ],
    )
    for text in (dump(loaded.config), dump(loaded.config, loaded.origins)):
        path.write_text(text, encoding="utf-8")
        assert load(path).config == loaded.config


def test_the_origin_of_a_value_stands_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[train]\nsteps = 7\n", encoding="utf-8")
    loaded = load(path, ["model.config.vocab_size=8"])
    lines = dump(loaded.config, loaded.origins).splitlines()
    assert f"steps = 7  # {path}:2" in lines
    assert "vocab_size = 8  # override" in lines
    assert "seq_len = 128  # default" in lines


def test_json_has_the_sections_and_the_origins(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("", encoding="utf-8")
    shown = to_json(load(path, ["optim.lr=1e-3"]))
    assert (shown["optim"]["lr"], shown["checkpoint"]["async"], shown["run"]["dir"]) == (1e-3, True, "runs/nxtrain")
    assert (shown["origins"]["optim.lr"], shown["origins"]["optim.eps"]) == ("override", "default")


def test_every_key_is_listed_with_a_sentence() -> None:
    listed = {key.name: key for key in keys()}
    assert set(listed) == {*values(RunConfig()), "model.config"}
    assert [name for name, key in listed.items() if not key.doc.endswith(".")] == []


@pytest.mark.parametrize(
    ("name", "kind", "default"),
    [
        ("train.steps", "int", "1000"),
        ("optim.lr", "float", "0.0003"),
        ("optim.betas", "list", "[0.9, 0.95]"),
        ("optim.schedule", "cosine | constant | linear | wsd | inverse_sqrt | pieces", '"cosine"'),
        ("checkpoint.async", "bool", "true"),
        ("run.dir", "path", '"runs/nxtrain"'),
        ("model.config", "table", "{}"),
    ],
)
def test_a_key_tells_its_type_and_default(name: str, kind: str, default: str) -> None:
    (key,) = [key for key in keys() if key.name == name]
    assert (key.kind, key.default) == (kind, default)
