"""Names of runs and addresses of storage: what a person cannot have meant is refused before a folder of it is made."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxtrain.common.errors import ConfigError, Problem
from nxtrain.common.io.bucket import BucketPath
from nxtrain.common.io.object_store import location_of, open_store
from nxtrain.common.io.paths import local_path
from nxtrain.config import check
from nxtrain.config.check import resolve_config
from nxtrain.config.load import load
from nxtrain.config.tables import toml_value
from tests.support import TINY, commands

REST = "bucket/run"
OTHERS = (
    "http",
    "https",
    "hdfs",
    "ftp",
    "sftp",
    "abfss",
    "hf",
    "file",
    "x",
    "FTP",
    "s3a",
    "s3n",
    "S3",
    "git+ssh",
)


def refused(folder: Path, *overrides: str) -> list[tuple[str, str]]:
    path = folder / "run.toml"
    path.touch()
    with pytest.raises(ConfigError) as error:
        resolve_config(load(path, overrides), 1)
    return [(problem.key, str(problem)) for problem in error.value.problems]


@pytest.mark.parametrize("scheme", OTHERS)
@pytest.mark.parametrize(
    "key", ["checkpoint.mirror", "checkpoint.resume", "data.path", "data.cache_dir", "compile.cache_dir", "run.dir"]
)
def test_an_address_of_another_service_is_no_folder(tmp_path: Path, key: str, scheme: str) -> None:
    (problem,) = refused(tmp_path, f"{key}={scheme}://{REST}")
    assert problem[0] == key
    assert f"an address of {scheme}, " in problem[1]


@st.composite
def misspelt(draw: st.DrawFn) -> str:
    """A slip in the scheme of `s3://bucket/run`: a letter more, less, swapped or in another case, or a slash."""
    letters = list("s3")
    slip = draw(st.sampled_from(["insert", "delete", "replace", "swap", "upper", "slash"]))
    at = draw(st.integers(0, 1))
    other = draw(st.sampled_from("abcdefghijklmnopqrstuvwxyz0123456789"))
    if slip == "insert":
        letters.insert(at, other)
    elif slip == "delete":
        letters.pop(at)
    elif slip == "replace":
        letters[at] = other
    elif slip == "swap":
        letters.reverse()
    elif slip == "upper":
        letters[0] = "S"
    scheme = "".join(letters)
    between = draw(st.sampled_from([":/", ":", "//", "/:/"])) if slip == "slash" else "://"
    return f"{scheme}{between}{REST}"


@given(misspelt())
def test_a_misspelt_address_is_no_folder(text: str) -> None:
    if text.startswith("s3://"):
        assert location_of(text) == BucketPath(text)
        return
    for read in (location_of, open_store, local_path):
        with pytest.raises(ConfigError, match="an address of "):
            read(text)


NEAREST = {"s3": ["S3", "s3a", "s3n", "ss3", "s", "3"], "gs": ["GS", "gcs"], "az": ["AZ", "abfs", "abfss", "wasbs"]}


@pytest.mark.parametrize("nearest", NEAREST)
def test_the_nearest_scheme_is_named(nearest: str) -> None:
    for scheme in NEAREST[nearest]:
        with pytest.raises(ConfigError, match=f"did you mean {nearest}://{REST}"):
            location_of(f"{scheme}://{REST}")


def test_the_path_of_a_file_address_is_named() -> None:
    with pytest.raises(ConfigError, match="did you mean /shared/run"):
        location_of("file:///shared/run")


@pytest.mark.parametrize("text", ["runs/a:b", "/a:/b", "./http:/x", "s3/data", "s3", "a b/c", "12:30/x", "..", "run:1"])
def test_a_path_stays_a_path(text: str) -> None:
    assert location_of(text) == local_path(text) == Path(text)


@pytest.mark.parametrize(
    ("command", "address"),
    [
        (["generate", "http://x/run", "--prompt", "a"], "http"),
        (["report", "gs://x/run"], "gs"),
        (["eval", "s3a://x/run"], "s3a"),
        (["convert", "nxtrain-to-hf", "hf://x/run", "out"], "hf"),
        (["watch", "https://x/run"], "https"),
    ],
)
def test_commands_refuse_an_address_of_another_service(command: list[str], address: str) -> None:
    err = commands.errors_of(*command, code=ConfigError.exit_code)
    assert f"an address of {address}, " in err


@pytest.mark.parametrize(
    "name",
    ["", " ", ".", "..", "../esc", "a/b", "/abs", "a/", "line\nbreak", "tab\t", "\x1b[31m", "x" * 201, "\xe9" * 101],
)
def test_a_name_that_is_no_name_of_a_folder_is_refused(tmp_path: Path, name: str) -> None:
    for overrides in ((), ("run.dir=elsewhere",)):
        (problem,) = refused(tmp_path, f"run.name={toml_value(name)}", *overrides)
        assert problem[0] == "run.name"


@pytest.mark.parametrize("name", ["a", "a b", "\xe9", "..a", "a..", "-x", "x" * 200, "$(id)", "a\\b", "'\"", "{host}"])
def test_any_other_name_is_a_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / "run.toml"
    path.touch()
    assert resolve_config(load(path, [f"run.name={toml_value(name)}"]), 1).config.run.dir == Path("runs") / name


@pytest.mark.parametrize(
    ("text", "is_empty"), [("", True), ("# run.seed = 1\n", True), ("[run]\n", True), ("run.seed = 0\n", False)]
)
def test_a_file_that_sets_nothing_is_known(tmp_path: Path, text: str, is_empty: bool) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    assert load(path, ["train.steps=1"]).sets_anything != is_empty


def problems(folder: Path, *overrides: str) -> tuple[Problem, ...]:
    (folder / "run.toml").touch()
    try:
        resolve_config(load(folder / "run.toml", overrides), None)
    except ConfigError as error:
        return error.problems
    return ()


@pytest.mark.parametrize("uri", ["sqlite:///runs.db", "postgresql+psycopg2://u:p@host/db", "mysql://host/db"])
@pytest.mark.parametrize("is_installed", [False, True])
def test_a_database_of_mlflow_is_refused_where_nothing_can_open_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str, is_installed: bool
) -> None:
    monkeypatch.setattr(check, "find_spec", lambda name: object() if is_installed else None)
    result = problems(tmp_path, f"metrics.mlflow={uri}")
    assert [problem.key for problem in result] == ([] if is_installed else ["metrics.mlflow"])
    assert all("http://HOST:5000" in problem.hint for problem in result)
    assert not problems(tmp_path, "metrics.mlflow=http://host:5000")


@pytest.mark.parametrize("name", ["./org/name", "name", "/a/b", "runs/name"])
def test_a_path_is_looked_for_here_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    (result,) = problems(tmp_path, f"model.hf={name}")
    assert result.key == "model.hf"
    assert result.hint == "for a repository of the Hub, write model.hf=hf://ORGANIZATION/NAME"


@pytest.mark.parametrize("name", ["hf://", "hf://name", "hf://org/name/config.json"])
def test_an_address_of_the_hub_names_a_repository(tmp_path: Path, name: str) -> None:
    (result,) = problems(tmp_path, f"model.hf={name}")
    assert result.key == "model.hf"
    assert "names no repository" in result.reason


@pytest.mark.parametrize("key", ["run.dir", "data.cache_dir", "compile.cache_dir", "compile.manifest"])
def test_an_empty_path_is_not_the_working_directory(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key} \(override\): \"\": names no path; leave the key out") as refused:
        load(TINY, [f"{key}="])
    assert len(refused.value.problems) == 1
    load(TINY, [f"{key}=."])
