"""Files, `extends` and overrides become one strict `RunConfig`, and every mistake is reported with its origin."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Any

import pytest

from nxtrain.common.errors import ConfigError, Problem
from nxtrain.config import decode
from nxtrain.config.load import load
from nxtrain.config.operation_schema import MetricsConfig
from nxtrain.config.schema import BackendConfig, RunConfig


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    return write(tmp_path / "run.toml", "")


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def problems_of(path: Path, *overrides: str) -> dict[str, Problem]:
    with pytest.raises(ConfigError) as raised:
        load(path, overrides)
    return {problem.key: problem for problem in raised.value.problems}


def test_an_empty_file_is_all_defaults(empty: Path) -> None:
    loaded = load(empty)
    assert loaded.config == RunConfig()
    assert set(loaded.origins.values()) == {"default"}


def test_a_recorded_key_of_earlier_runs_has_no_effect(tmp_path: Path) -> None:
    path = write(tmp_path / "run.toml", '[backend]\ncpu_kernels = "native"\ncpu_transport = "gloo"\n')
    assert load(path).config.backend == BackendConfig(cpu_transport="gloo")
    assert "backend.cpu_kernel" in problems_of(path, 'backend.cpu_kernel="native"')


def test_later_files_win_then_the_file_itself_then_overrides(tmp_path: Path) -> None:
    write(tmp_path / "one.toml", "[train]\nsteps = 1\nseq_len = 1\nglobal_batch = 1\n\n[optim]\nlr = 1.0\n")
    write(tmp_path / "two.toml", "[train]\nsteps = 2\nseq_len = 2\nglobal_batch = 2\n")
    top = write(
        tmp_path / "top.toml", "extends = ['one.toml', 'two.toml']\n[train]\n# half\nsteps = 3\nglobal_batch = 3\n"
    )
    loaded = load(top, ["train.steps=4"])
    train = loaded.config.train
    assert (train.steps, train.global_batch, train.seq_len, loaded.config.optim.lr) == (4, 3, 2, 1.0)
    assert {key: origin for key, origin in loaded.origins.items() if origin != "default"} == {
        "train.steps": "override",
        "train.seq_len": f"{tmp_path / 'two.toml'}:3",
        "train.global_batch": f"{top}:5",
        "optim.lr": f"{tmp_path / 'one.toml'}:7",
    }


def test_extends_is_relative_to_the_file_that_says_it(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    write(tmp_path / "inner" / "base.toml", "run.seed = 7\n")
    write(tmp_path / "inner" / "middle.toml", "extends = ['base.toml']\n")
    assert load(write(tmp_path / "top.toml", "extends = ['inner/middle.toml']\n")).config.run.seed == 7


def test_a_circle_of_extends_is_reported(tmp_path: Path) -> None:
    write(tmp_path / "a.toml", "extends = ['b.toml']\n")
    write(tmp_path / "b.toml", "extends = ['a.toml']\n")
    assert (
        problems_of(tmp_path / "a.toml")["extends"].reason
        == "files extend each other in a circle: a.toml -> b.toml -> a.toml"
    )


def test_two_files_may_share_a_base(tmp_path: Path) -> None:
    write(tmp_path / "base.toml", "run.seed = 7\n")
    for name in ("a.toml", "b.toml"):
        write(tmp_path / name, "extends = ['base.toml']\n")
    assert load(write(tmp_path / "top.toml", "extends = ['a.toml', 'b.toml']\n")).config.run.seed == 7


@pytest.mark.parametrize("extends", ["'base.toml'", "[1]"])
def test_extends_is_a_list_of_names(tmp_path: Path, extends: str) -> None:
    assert "list of file names" in problems_of(write(tmp_path / "a.toml", f"extends = {extends}\n"))["extends"].reason


@pytest.mark.parametrize(
    ("override", "section", "attribute", "value"),
    [
        ("data.source=text", "data", "source", "text"),
        ("run.name=hello world", "run", "name", "hello world"),
        ('run.name="123"', "run", "name", "123"),
        ("run.name=", "run", "name", ""),
        ("run.name=a=b", "run", "name", "a=b"),
        ("run.name=1\nb = 2", "run", "name", "1\nb = 2"),
        ("run.dir=/data/run#1", "run", "dir", Path("/data/run#1")),
        ("optim.lr=1e-3", "optim", "lr", 1e-3),
        ("optim.lr=1", "optim", "lr", 1.0),
        ("optim.betas=[0.9, 0.99]", "optim", "betas", (0.9, 0.99)),
        ("checkpoint.async=true", "checkpoint", "async_", True),
        ("train.steps=1_000", "train", "steps", 1000),
    ],
)
def test_an_override_is_toml_or_a_bare_word(
    empty: Path, override: str, section: str, attribute: str, value: object
) -> None:
    loaded = load(empty, [override])
    assert getattr(getattr(loaded.config, section), attribute) == value
    assert loaded.origins[override.partition("=")[0]] == "override"


def test_model_config_is_a_free_table_with_origins(tmp_path: Path) -> None:
    path = write(tmp_path / "a.toml", "[model.config]\nhidden_size = 8\n\n[model.config.rope_scaling]\nfactor = 8\n")
    loaded = load(path, ["model.config.rope_scaling.factor=32"])
    assert loaded.config.model.config == {"hidden_size": 8, "rope_scaling": {"factor": 32}}
    assert loaded.origins["model.config.hidden_size"] == f"{path}:2"
    assert loaded.origins["model.config.rope_scaling.factor"] == "override"


def test_the_folder_of_a_run_follows_its_name(empty: Path) -> None:
    assert load(empty, ["run.name=x"]).config.run.dir == Path("runs/x")


def test_all_mistakes_come_at_once_each_with_its_origin(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.toml",
        "[optim]\nlr = '3e-4'\nbetas = [0.9, true]\nepsilon = 1\n\n[train]\nsteps = 1.5\nlr = 1\nremat = 3\n"
        "\n[paralel]\ntp = 2\n\n[data]\nshuffle = 1\n",
    )
    result = problems_of(path, "data.source=txt", "run.name=3", "optim.clip=-1", "train.seq_len=nan", "nonsense")
    reasons = {key: (problem.reason, problem.origin) for key, problem in result.items()}
    assert reasons == {
        "": ("'nonsense' is not an override", ""),
        "optim.lr": ('"3e-4" is a string, but a number is needed', f"{path}:2"),
        "optim.betas": ("true is true or false, but a number is needed", f"{path}:3"),
        "optim.epsilon": ("unknown key", f"{path}:4"),
        "optim.clip": ("-1: must be greater than or equal to 0", "override"),
        "train.steps": ("1.5 is a number, but an integer is needed", f"{path}:7"),
        "train.lr": ("unknown key", f"{path}:8"),
        "train.remat": ("3 is not one of none, selective, full", f"{path}:9"),
        "train.seq_len": ("nan is a number, but an integer is needed", "override"),
        "paralel": ("unknown key", f"{path}:12"),
        "data.shuffle": ("1 is an integer, but true or false is needed", f"{path}:15"),
        "data.source": ('"txt" is not one of stdlib, text, arrow, tokens', "override"),
        "run.name": ("3 is an integer, but a string is needed", "override"),
    }
    assert {key: problem.hint for key, problem in result.items() if problem.hint} == {
        "": "write dotted.key=value",
        "optim.epsilon": "did you mean optim.eps?",
        "train.lr": "did you mean optim.lr?",
        "paralel": "did you mean parallel?",
        "data.source": "did you mean text?",
        "run.name": 'in a file: name = "3"; on the command line: run.name=\'"3"\'',
    }


def test_an_unknown_name_like_no_other_lists_the_known_ones(empty: Path) -> None:
    hint = problems_of(empty, "metrics.zzz=1")["metrics.zzz"].hint
    assert hint == "known: " + ", ".join(f"metrics.{name}" for name in MetricsConfig.model_fields)


def test_the_python_name_of_async_is_no_key(empty: Path) -> None:
    assert problems_of(empty, "checkpoint.async_=false")["checkpoint.async_"].hint == "did you mean checkpoint.async?"


def test_a_section_is_a_table(tmp_path: Path) -> None:
    problem = problems_of(write(tmp_path / "a.toml", "\noptim = 3\n"))["optim"]
    assert problem.reason == "3 is an integer, but a table is needed"
    assert problem.origin == f"{tmp_path / 'a.toml'}:2"


def test_broken_toml_names_file_and_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.toml", "[run]\nname = 'x'\nseed 3\n")
    assert problems_of(path)[""].reason.startswith(f"{path}:3: not valid TOML: ")


@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"], ids=["plain", "marked"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"], ids=["unix", "windows"])
def test_a_file_of_another_editor_is_the_same(tmp_path: Path, start: bytes, end: bytes) -> None:
    """Editors of Windows end lines by two characters, and may put a mark of UTF-8 first."""
    file = tmp_path / "run.toml"
    file.write_bytes(start + end.join([b"[run]", b'name = "a"', b"[train]", b"steps = 7", b""]))
    loaded = load(file, ())
    assert (loaded.config.run.name, loaded.config.train.steps) == ("a", 7)
    assert loaded.origins["train.steps"] == f"{file}:4"


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_bytes(b"name = '\xff'")
    assert problems_of(path)[""].reason == f"{path}: not UTF-8 text: invalid start byte at byte 8"


def test_a_missing_file_is_named_with_the_nearest_one(tmp_path: Path) -> None:
    near = write(tmp_path / "tiny_cpu.toml", "")
    problem = problems_of(tmp_path / "tiny-cpu.toml")[""]
    assert problem.reason == f"cannot read {tmp_path / 'tiny-cpu.toml'}: No such file or directory"
    assert problem.hint == f"did you mean {near}?"
    assert problems_of(tmp_path / "zzz")[""].hint == "found there: tiny_cpu.toml"


def test_the_files_of_a_folder_in_place_of_a_file_are_named(tmp_path: Path) -> None:
    """A run folder is such a one."""
    write(tmp_path / "run.toml", "")
    (tmp_path / "run").mkdir()
    assert problems_of(tmp_path / "run")[""].hint == ""
    write(tmp_path / "run" / "config.toml", "")
    assert problems_of(tmp_path / "run")[""].hint == "found there: config.toml"


def test_a_list_that_is_too_short_lacks_an_entry(empty: Path) -> None:
    assert problems_of(empty, "optim.betas=[0.9]")["optim.betas"].reason == "[0.9]: entry 2 of the list is missing"


@pytest.mark.parametrize(
    ("word", "choice"), [("gpu", "cuda"), ("GPU", "cuda"), ("trainium", "neuron"), ("cdua", "cuda")]
)
def test_devices_are_known_by_the_words_of_people(empty: Path, word: str, choice: str) -> None:
    assert problems_of(empty, f"backend.name={word}")["backend.name"].hint == f"did you mean {choice}?"


LONG = {
    "keys": "[train]\n" + "".join(f"stepz{n} = {n}\n" for n in range(20_000)),
    "tables": "".join(f"[t{n}]\na = {n}\n" for n in range(20_000)),
    "dotted": "".join(f"train.a{n}.b = {n}\n" for n in range(20_000)),
    "list": f"parallel.pipeline_cuts = [{', '.join(20_000 * ['true'])}]\n",
}


@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
def test_what_is_wrong_thousands_of_times_is_explained_some_times_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    searched = list[str]()

    def search(name: str, *rest: Any, **kwargs: Any) -> list[str]:
        searched.append(name)
        return get_close_matches(name, *rest, **kwargs)

    monkeypatch.setattr(decode, "get_close_matches", search)
    path = write(tmp_path / "a.toml", f"optim.lr = true\n{text}")
    with pytest.raises(ConfigError) as refused:
        load(path)
    *problems, last = refused.value.problems
    assert len(problems) == decode.MOST_PROBLEMS == 100
    assert len(searched) <= 100
    assert all(problem.key and problem.origin.startswith(f"{path}:") for problem in problems)
    assert last.reason == f"{20_001 - 100:,} more problems of the same configuration are not shown"
    assert last.hint
    assert "optim.lr" in {problem.key for problem in problems}, "it is not lost among the others"


def test_a_hundred_problems_are_all_explained(tmp_path: Path) -> None:
    path = write(tmp_path / "a.toml", "".join(f"train.a{n} = {n}\n" for n in range(100)))
    assert len(problems_of(path)) == 100


def test_the_origin_of_a_table_is_that_of_its_first_value(tmp_path: Path) -> None:
    path = write(tmp_path / "a.toml", "[zzz.b]\nc = 1\n\n[zzz.a]\nd = 1\n")
    assert problems_of(path)["zzz"].origin == f"{path}:2"
