"""Files for clusters from the worst texts of every key and option, and options that mean nothing to a target."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nxtrain.common.errors import ConfigError
from nxtrain.config.load import load, values
from nxtrain.config.tables import toml_value
from nxtrain.launch.local import Command
from nxtrain.launch.targets import kubernetes
from nxtrain.launch.targets.job import CONFIG_FILE, ClusterJob, LaunchOptions, resolve_job
from nxtrain.launch.targets.render import NAMES, RENDERERS, launch_on
from nxtrain.launch.targets.slurm import container_mounts, container_options, graph_folder
from tests.support.commands import in_process
from tests.unit.launch.test_targets import (
    NASTY,
    RECIPE,
    SMALL,
    expanded,
    job,
    loaded_values,
    shape_of,
    texts_and_paths,
)

EVERYTHING = """/'"$(touch owned)`touch owned`\\ #{x}'\n---\nkind: Pod\n#SBATCH --nodes=9\n\'\'\'\x07\x85\u8bad %s"""
"""Text that leaves every quotation, comment, line and character set that a file could put it into."""

PLAIN = {
    RECIPE: ("checkpoint.mirror=s3://mirror/b", *SMALL),
    "configs/demo.toml": ("checkpoint.mirror=mirror/b", "backend.name=cpu", "cluster.instance=m5.xlarge"),
}
"""Overrides of runs: one with an instance that is known, and one on machines of any name."""


def all_texts(
    config: str,
    *overrides: str,
    options: LaunchOptions = LaunchOptions(),  # noqa: B008
) -> tuple[ClusterJob, dict[str, str]]:
    """A run, and its files by target and name."""
    run = resolve_job(Path(config), (*PLAIN[config], *overrides), options)
    return run, {f"{target}/{name}": text for target, render in RENDERERS.items() for name, text in render(run).items()}


@cache
def plain_texts(config: str) -> dict[str, str]:
    """Files of a run without texts of a user."""
    return all_texts(config)[1]


@cache
def text_keys() -> list[str]:
    """Keys of a configuration that take a text of the user."""
    results = []
    for key, value in values(load(Path(RECIPE), ()).config).items():
        if isinstance(value, str | Path) or value is None:
            with suppress(ConfigError):
                load(Path(RECIPE), (f"{key}=/a b",))
                results.append(key)
    return results


@pytest.mark.parametrize("config", PLAIN)
def test_the_worst_text_of_each_key_changes_the_form_of_no_file(config: str) -> None:
    assert len(text_keys()) > 12
    refused = {key for key in text_keys() if not is_inert(config, {key: EVERYTHING}, EVERYTHING, EVERYTHING)}
    assert "cluster.instance" in refused
    assert not refused & {"metrics.mlflow", "run.dir", "data.path", "data.tokenizer", "compile.cache_dir"}


@settings(max_examples=15)
@given(data=st.data(), config=st.sampled_from(sorted(PLAIN)), image=NASTY, claim=NASTY)
def test_no_drawn_text_changes_the_form_of_a_file(data: st.DataObject, config: str, image: str, claim: str) -> None:
    keys = data.draw(st.lists(st.sampled_from(text_keys()), min_size=1, max_size=2, unique=True))
    is_inert(config, {key: data.draw(NASTY, label=key) for key in keys}, image, claim)


def is_inert(config: str, texts: Mapping[str, str], image: str, claim: str) -> bool:
    """Hold all files of a run to those of a plain one; False if its texts are refused with a reason."""
    overrides = (f"{key}={toml_value(text)}" for key, text in texts.items())
    try:
        run, files = all_texts(config, *overrides, options=LaunchOptions(image=image, claim=claim))
    except ConfigError as error:
        assert all(problem.reason for problem in error.problems)
        return False
    plain = plain_texts(config)
    assert set(files) == set(plain)
    folders = {str(run.config.compile.cache_dir), kubernetes.CACHE}
    own = {image, claim, run.config_text, run.machine.name, f"ml.{run.machine.name}"}
    own |= folders | {f"compile.cache_dir={folder}" for folder in folders}
    for file, text in files.items():
        if file.endswith(".yaml"):
            _judge_yaml(text, plain[file], run, own)
        elif file.endswith(".toml"):
            assert loaded_values(text) == values(run.config), file
        elif file.endswith(".py"):
            assert shape_of(text) == shape_of(plain[file])
        elif file.endswith(".sbatch"):
            _judge_script(text, plain[file], run)
        else:
            assert text == plain[file], f"{file} has a text of the user"
    return True


def _judge_yaml(text: str, plain: str, run: ClusterJob, own: set[str]) -> None:
    """Hold a file to a plain one: its fields are the same, and its texts too, but for those of the user."""
    assert text.isascii()
    documents, expected = (list(yaml.safe_load_all(item)) for item in (text, plain))
    fields, plain_fields = (list(texts_and_paths(item)) for item in (documents, expected))
    assert {path for path, _ in fields} == {path for path, _ in plain_fields}
    plain_values = {value for _, value in plain_fields}
    for path, value in fields:
        read = expanded(str(value)) if "/args/" in path else value
        assert value in plain_values or read in own or run.name in str(value), (path, value)
    for document in documents:
        if document.get("kind") == "ConfigMap":
            assert loaded_values(document["data"][CONFIG_FILE]) == values(run.config)


def _judge_script(text: str, plain: str, run: ClusterJob) -> None:
    """Hold a job script to a plain one: they differ by the name of the job, and by the words of one command."""
    line = f"set -- {shlex.join([str(run.path), *run.overrides, f'--nproc={run.nproc}'])}\n"
    assert text.count(f"\n{line}") == 1
    assert shlex.split(line)[2:] == [str(run.path), *run.overrides, f"--nproc={run.nproc}"]
    rest = text.replace(line, "").replace(f"--job-name={run.name} ", "--job-name= ")
    rest = rest.replace(f"--output={run.name}-%j.log", "--output=")
    if run.options.image:
        rest = rest.replace(f" {container_options(run.options.image, container_mounts(run))}", "", 1)
        rest = re.sub(rf"\nsrun mkdir -p {re.escape(graph_folder(run))} .*", "", rest)
    expected = re.sub(r"--output=\S+", "--output=", re.sub(r"--job-name=\S+ ", "--job-name= ", plain))
    assert rest == re.sub(r"set -- .*\n", "", expected)


@given(
    st.lists(st.text("aA1 .+=-\xe9\u8bad", max_size=60).map(lambda end: f"a{end}"), min_size=2, max_size=2, unique=True)
)
@example(["x=1", "x-1"])
@example(["lr+1", "lr-1"])
@example(["7b", "run-7b"])
@example(["Demo", "demo"])
@settings(max_examples=20)
def test_names_that_a_label_cannot_hold_stay_apart(names: list[str]) -> None:
    labels = [job(f"run.name={toml_value(name)}").name for name in names]
    assert len(set(labels)) == 2
    assert all(re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", label) for label in labels)


def test_what_an_operator_gives_in_vain_is_refused(tmp_path: Path) -> None:
    cases = {
        "--out": ("--out", str(tmp_path / "deploy")),
        "--image": ("--image", "a"),
        "--mounts has no effect with --target eks": ("--target", "eks", "--mounts", "/fsx:/fsx"),
        "--mounts has no effect without a container": ("--target", "slurm", "--dry-run", "--mounts", "/fsx:/fsx"),
        "'fsx' is not SRC:DST": ("--target", "slurm", "--dry-run", "--image", "a", "--mounts", "/a:/a,fsx"),
        "--storage has no effect with --target slurm": ("--target", "slurm", "--storage", "4800"),
        "use --storage 57600": ("--target", "eks", "--dry-run", "--storage", "56000"),
        "--first-node": ("--target", "slurm", "--dry-run", "--first-node", "n1:29501"),
        "a path is empty": ("--target", "slurm", "--out", ""),
        "'0' is not a port": ("--first-node", "n1:0"),
        "'n1:\u00b2'": ("--first-node", "n1:\u00b2"),
        "'n1\\ntouch owned'": ("--dry-run", "--first-node", "n1\ntouch owned"),
        "'' is not the name of a machine": ("--first-node", ":29500"),
        "'-x' is not the name of a machine": ("--first-node=-x",),
    }
    for said, argv in cases.items():
        code, out, err = in_process("launch", RECIPE, *argv)
        assert (code, out) == (2, "")
        assert said in err.replace("\n", " "), err
    assert list(tmp_path.iterdir()) == []


def test_files_that_another_launch_left_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launches = (
        ("kubernetes", "", ""),
        ("kubernetes", "", ""),
        ("hyperpod", "pytorchjob.yaml", "mpijob.yaml, jobset.yaml"),
        ("kubernetes", "pytorchjob.yaml", "train.sbatch"),
    )
    for target, replaced, left in launches:
        launch_on(target, Path(RECIPE), SMALL, LaunchOptions(), out=tmp_path, dry_run=False)
        expected = f"{tmp_path / replaced} was another file, and is replaced\n" if replaced else ""
        expected += f"{tmp_path} also has {left} of another launch; delete what is not meant\n" if left else ""
        assert capsys.readouterr().err == expected
    written = [{Path(key).name for key in plain_texts(config)} for config in PLAIN]
    assert set.union(*written) == set(NAMES)


def test_notes_of_a_command_stay_comments() -> None:
    assert str(Command(("true",), about=("one\ntouch owned",))) == "# one\n# touch owned\ntrue"
