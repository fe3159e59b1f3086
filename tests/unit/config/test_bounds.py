"""No number, text or table makes a configuration end in anything but a message, and every bound is there by rule."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import annotated_types
import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from nxtrain.common.errors import ConfigError
from nxtrain.common.family import find_family
from nxtrain.config.bounds import MAX_DEPTH, MAX_INT, faults, integer, shortened
from nxtrain.config.check import resolve_config
from nxtrain.config.load import load
from nxtrain.config.schema import RunConfig


def refused(tmp_path: Path, *overrides: str, text: str = "") -> str:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        resolve_config(load(path, overrides), world=1)
    assert len(str(raised.value)) < 2000
    return str(raised.value)


def integers(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo, Any]]:
    """Every field that holds integers, and what of it carries the bounds."""
    for name, field in section.model_fields.items():
        kinds = [field.annotation, *get_args(field.annotation)]
        for kind in kinds:
            if get_origin(kind) is None and isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from integers(kind, f"{prefix}{name}.")
        if field.annotation is int:
            yield f"{prefix}{name}", field, field.metadata
        for kind in kinds:
            arguments = get_args(kind)
            if arguments and arguments[0] is int:  # a list's, or an optional one
                yield f"{prefix}{name}", field, [*arguments[1:], *field.metadata]


def bounds_of(metadata: Any) -> tuple[bool, bool]:
    flat: list[Any] = []
    for entry in metadata:
        flat += entry.metadata if isinstance(entry, FieldInfo) else [entry]
    low = any(isinstance(entry, annotated_types.Gt | annotated_types.Ge) for entry in flat)
    high = any(isinstance(entry, annotated_types.Lt | annotated_types.Le) for entry in flat)
    return low, high


@pytest.mark.parametrize("section", [RunConfig, find_family("llama").config_type], ids=lambda kind: kind.__name__)
def test_every_integer_has_both_bounds(section: type[BaseModel]) -> None:
    result = {name: bounds_of(metadata) for name, _, metadata in integers(section)}
    assert len(result) > 5
    assert {name: both for name, both in result.items() if both != (True, True)} == {}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.steps=" + "9" * 26, "is not an integer of 64 bits"),
        ("train.steps=-" + "9" * 26, "is not an integer of 64 bits"),
        ("model.config.hidden_size=" + "9" * 26, "is not an integer of 64 bits"),
        ("train.steps=" + "9" * 5000, "not readable as TOML"),
        ("train.steps=0x" + "f" * 6000, "an integer of about 7,225 digits"),
        ("train.steps=" + "[" * 1000 + "]" * 1000, f"more than {MAX_DEPTH} deep"),
        ("train.steps=" + "[" * 40 + "]" * 40, f"more than {MAX_DEPTH} deep"),
        ("model.config=" + "{a=" * 300 + "1" + "}" * 300, f"more than {MAX_DEPTH} deep"),
        (".".join("a" * 3000) + "=1", f"more than {MAX_DEPTH} deep"),
        ("run.name=\udcff", "is not UTF-8 text"),
        ('data.path="\\u0000"', "holds a NUL character"),
        ("run.seed=" + '"' + "x" * 10_000 + '"', "an integer is needed"),
        ("train.global_batch=99999999999999", "must be less than or equal to"),
        ("recovery.hang_timeout_s=1e300", "must be less than or equal to"),
        ("model.config.rms_norm_eps=inf", "must be a finite number"),
        ("model.config.rope_theta=inf", "must be a finite number"),
        ("model.config.initializer_range=inf", "must be a finite number"),
        ("model.config.initializer_range=nan", "must be a finite number"),
        ("model.config.rope_theta=1e300", "must be less than or equal to"),
        ('model.config.rope_scaling={rope_type="linear",factor=inf}', "must be a finite number"),
    ],
    ids=lambda text: text[:40].encode("ascii", "replace").decode(),
)
def test_what_no_configuration_can_mean_is_refused_in_a_few_words(tmp_path: Path, override: str, words: str) -> None:
    said = refused(tmp_path, override)
    assert words in said
    assert "override" in said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = " + "[" * 1000 + "]" * 1000, f"more than {MAX_DEPTH} deep"),
        ("x = " + "[" * 40 + "]" * 40, f"more than {MAX_DEPTH} deep"),
        (".".join("a" * 3000) + " = 1", f"more than {MAX_DEPTH} deep"),
        ("[train]\nsteps = " + "9" * 26, "run.toml:2): 9999"),
        ("[train]\nsteps = " + "9" * 5000, "not readable as TOML"),
        ("[run]\nname = 'a'\ndir = \"\\u0000\"", "run.toml:3): '\\x00' holds a NUL character"),
        ('[model.config]\n"a\\u0000b" = 1', "holds a NUL character"),
    ],
    ids=lambda text: text[:20],
)
def test_files_are_held_to_the_same_limits(tmp_path: Path, text: str, words: str) -> None:
    assert words in refused(tmp_path, text=text)


def test_a_world_has_a_limit(tmp_path: Path) -> None:
    degrees = ("parallel.tp=1048576", "parallel.pp=1048576")
    assert "the run would have 1,099,511,627,776 ranks" in refused(tmp_path, *degrees)


def test_lists_of_numbers_that_work_are_short(tmp_path: Path) -> None:
    said = refused(tmp_path, "train.global_batch=2147483646", "train.micro_batch=16", "parallel.dp=1")
    assert "micro_batch among 1, 2, 3, 6, 7" in said
    assert "more" in said
    assert "divides" not in said


def test_limits_are_where_they_are_said_to_be() -> None:
    at, beyond = {"a": [MAX_INT, -MAX_INT - 1]}, {"a": [MAX_INT + 1, -MAX_INT - 2]}
    assert (len([*faults(at)]), len([*faults(beyond)])) == (0, 2)
    inside: Any = 1
    for _ in range(MAX_DEPTH):
        inside = [inside]
    assert [*faults({"a": inside})] == []
    assert [key for key, _ in faults({"a": {"b": [[inside]]}})] == ["a.b"]
    assert shortened("x" * 80) == "x" * 80
    assert shortened("x" * 81).startswith("x" * 80 + "... (81")
    assert integer(12) == "12"


@pytest.mark.parametrize(
    "key", ["run.dir", "model.hf", "data.path", "data.tokenizer", "checkpoint.mirror", "checkpoint.resume"]
)
def test_the_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "run.toml"
    path.write_text("")
    section, name = key.split(".")
    for text in ("~/x", '"~/x"'):
        assert str(getattr(getattr(load(path, [f"{key}={text}"]).config, section), name)) == f"{tmp_path}/x"
    path.write_text(f"{key} = '~'")
    assert str(getattr(getattr(load(path).config, section), name)) == str(tmp_path)
    said = refused(tmp_path, f"{key}=~nobody-of-this-name/x")
    assert "no user of this machine is called nobody-of-this-name; write ./~nobody-of-this-name/x" in said
    assert not (Path.cwd() / "~").exists()


@pytest.mark.parametrize("key", ["compile.cache_dir", "compile.manifest"])
def test_the_home_folder_is_expanded_for_compiled_graphs(tmp_path: Path, key: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text("")
    result = getattr(load(path, [f"{key}=~/{{host}}"]).config.compile, key.partition(".")[2])
    assert result == Path(os.path.expanduser("~")) / "{host}"


@pytest.mark.parametrize("key", ["run.dir", "model.hf", "data.path", "data.tokenizer"])
@pytest.mark.parametrize("scheme", ["s3", "gs", "https"])
def test_addresses_are_refused_where_a_path_of_this_machine_is_read(tmp_path: Path, key: str, scheme: str) -> None:
    said = refused(tmp_path, f"{key}={scheme}://bucket/text")
    if key == "data.path" and scheme in ("s3", "gs"):  # read by two of the sources
        assert f"{scheme}://bucket/text is in a bucket, and source=stdlib reads files of this machine" in said
        return
    assert f"an address of {scheme}, but only a local path can be read here; fetch it with" in said


def test_addresses_stay_where_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("")
    config = load(path, ["checkpoint.mirror=s3://b/x", "checkpoint.resume=s3://b/y"]).config.checkpoint
    assert (config.mirror, config.resume) == ("s3://b/x", "s3://b/y")
