"""Files for clusters: the kept ones are rendered, and no text of a user means anything in them but itself."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from nxtrain.cli import launch as launch_command
from nxtrain.config.load import load, values
from nxtrain.config.tables import toml_value
from nxtrain.errors import ConfigError
from nxtrain.launch.local import Command
from nxtrain.launch.local import render as render_local
from nxtrain.launch.targets import kubernetes
from nxtrain.launch.targets.job import CONFIG_FILE, Job, Options, resolve_job
from nxtrain.launch.targets.machines import MACHINES
from nxtrain.launch.targets.render import NAMES, RENDERERS, launch_on
from nxtrain.launch.targets.yaml_text import dump_yaml
from nxtrain.plan.hardware import MACHINES as PLANNED
from tests.support.commands import in_process
from tests.support.launch_cases import CASES, GOLDEN, ROOT, all_files

VALIDATED = GOLDEN / "validated.json"
RECIPE = "configs/llama2_7b_trn1.toml"
SMALL = ("cluster.nodes=4", "parallel.dp=16")

TEXTS = st.text(
    st.one_of(
        st.sampled_from("$(){}`'\"\\#!&|;:%-\n\r\t ~*?[]<>,@=^\x7f\x85\u2028"), st.characters(exclude_categories=["Cs"])
    ),
    min_size=1,
).filter(lambda text: "\0" not in text)
WORDS = """$(touch~owned) `touch~owned` $(HOME) $$(HOME) $HOME ';touch~owned;' " a|#SBATCH~--nodes=9 y n on null ~ 1e3
0o7 0x1F 1_0 .inf 2026-01-01 = << a:~b -~a {{x}} '''|import~os {nodes} x|---|kind:~Pod --wrap=touch~owned"""
NASTY = st.one_of(TEXTS, st.sampled_from([word.replace("~", " ").replace("|", "\n") for word in WORDS.split()]))


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def job(*overrides: str, options: Options = Options()) -> Job:  # noqa: B008
    return resolve_job(Path(RECIPE), (*SMALL, *overrides), options)


# Kept files


def test_kept_files_are_rendered() -> None:
    expected = {path: path.read_text(encoding="ascii") for path in GOLDEN.rglob("*") if path.parent != GOLDEN}
    found = all_files()
    assert set(expected) == {path for path in found if path.is_relative_to(GOLDEN)}
    stale = [str(path.relative_to(ROOT)) for path, text in found.items() if path.read_text(encoding="ascii") != text]
    assert stale == [], "run python -m tests.support.launch_cases, and judge the difference"


def test_validators_have_judged_the_kept_files_as_they_are() -> None:
    judged = json.loads(VALIDATED.read_text(encoding="ascii"))
    files = {str(path.relative_to(ROOT)): text for path, text in all_files().items()}
    # The tests submit Slurm's scripts to a real Slurm, and every other test loads configurations.
    wanted = {name: text for name, text in files.items() if not name.endswith((".sbatch", ".toml"))}
    assert set(judged) == set(wanted)
    for name, text in wanted.items():
        assert judged[name]["sha256"] == hashlib.sha256(text.encode()).hexdigest(), (
            f"{name}: see docs/slurm_kubernetes.md"
        )
        assert judged[name]["by"], name


def test_the_command_offers_every_target() -> None:
    choices = get_args(get_type_hints(launch_command.launch)["target"])
    assert set(choices) == {"local", *RENDERERS}
    assert {case.target for case in CASES.values()} == set(RENDERERS)


def test_machines_have_the_devices_that_the_planner_counts() -> None:
    common = set(MACHINES) & set(PLANNED)
    assert len(common) > 12
    assert {name: MACHINES[name].ranks for name in common} == {name: PLANNED[name].devices for name in common}
    assert MACHINES["trn1.32xlarge"].resources == {
        "aws.amazon.com/neuron": 16,
        "vpc.amazonaws.com/efa": 8,
        "hugepages-2Mi": "5120Mi",
    }
    assert MACHINES["trn2.48xlarge"].devices == 16


# Inert texts


def expanded(text: str) -> str:
    """Text as Kubernetes expands it with HOME defined, after k8s.io/kubernetes/third_party/forked/golang/expansion."""

    def one(found: re.Match[str]) -> str:
        if found[0] == "$$":
            return "$"
        return "/root" if found[1] == "HOME" else found[0]

    return re.sub(r"\$\$|\$\(([^)]*)\)", one, text)


def texts_and_paths(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from texts_and_paths(value, f"{path}/{key}")
    elif isinstance(node, list):
        for value in node:
            yield from texts_and_paths(value, f"{path}/-")
    else:
        yield path, node


@settings(max_examples=12)
@given(name=NASTY, folder=TEXTS, image=NASTY, claim=NASTY)
def test_every_text_is_itself_in_manifests_and_no_field_appears(name: str, folder: str, image: str, claim: str) -> None:
    overrides = (f"run.name={toml_value(name)}", f"compile.cache_dir={toml_value(f'/{folder}')}")
    run = job(*overrides, options=Options(image=image, claim=claim))
    for file, text in kubernetes.render(run).items():
        config, manifest = yaml.safe_load_all(text)
        _, expected = yaml.safe_load_all((GOLDEN / "kubernetes" / file).read_text(encoding="ascii"))
        fields = list(texts_and_paths(manifest))
        assert {path for path, _ in fields} == {path for path, _ in texts_and_paths(expected)}
        graphs = {value for path, value in fields if path.endswith("/hostPath/path")}
        assert graphs == {str(run.config.compile.cache_dir) if "{" not in folder else kubernetes.CACHE}
        assert {value for path, value in fields if path.endswith("/image")} == {image}
        assert {value for path, value in fields if path.endswith("/claimName")} == {claim}
        assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", manifest["metadata"]["name"])
        assert len(manifest["metadata"]["name"]) <= 40
        loaded = _loaded(config["data"][CONFIG_FILE])
        assert loaded["run.name"] == name


EVERYTHING = """/'"$(touch owned)`touch owned`\\ #{x}'\n---\nkind: Pod\n#SBATCH --nodes=9\n\'\'\'\x07\x85\u8bad %s"""
"""Text that leaves every quotation, comment, line and character set that a file could put it into."""

PLAIN = {
    RECIPE: ("checkpoint.mirror=s3://a/b", *SMALL),
    "configs/demo.toml": ("backend.name=cpu", "cluster.instance=m5.xlarge"),
}
"""Overrides of runs: one with an instance that is known, and one on machines of any name."""


def all_texts(config: str, *overrides: str, options: Options = Options()) -> tuple[Job, dict[str, str]]:  # noqa: B008
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
    found = []
    for key, value in values(load(Path(RECIPE), ()).config).items():
        if isinstance(value, str | Path) or value is None:
            with suppress(ConfigError):
                load(Path(RECIPE), (f"{key}=/a b",))
                found.append(key)
    return found


@pytest.mark.parametrize("config", PLAIN)
def test_the_worst_text_of_each_key_changes_the_form_of_no_file(config: str) -> None:
    assert len(text_keys()) > 12
    refused = {key for key in text_keys() if not is_inert(config, {key: EVERYTHING}, EVERYTHING, EVERYTHING)}
    assert "cluster.instance" in refused
    assert not refused & {"run.name", "run.dir", "data.path", "data.tokenizer", "compile.cache_dir"}


@settings(max_examples=15)
@given(data=st.data(), config=st.sampled_from(sorted(PLAIN)), image=NASTY, claim=NASTY)
def test_no_drawn_text_changes_the_form_of_a_file(data: st.DataObject, config: str, image: str, claim: str) -> None:
    keys = data.draw(st.lists(st.sampled_from(text_keys()), min_size=1, max_size=2, unique=True))
    is_inert(config, {key: data.draw(NASTY, label=key) for key in keys}, image, claim)


def is_inert(config: str, texts: Mapping[str, str], image: str, claim: str) -> bool:
    """Hold all files of a run to those of a plain one; False if its texts are refused with a reason."""
    overrides = (f"{key}={toml_value(text)}" for key, text in texts.items())
    try:
        run, files = all_texts(config, *overrides, options=Options(image=image, claim=claim))
    except ConfigError as error:
        assert all(problem.reason for problem in error.problems)
        return False
    plain = plain_texts(config)
    assert set(files) == set(plain)
    folders = {str(run.config.compile.cache_dir), kubernetes.CACHE}
    own = {image, claim, run.config_text, run.machine.instance, f"ml.{run.machine.instance}"}
    own |= folders | {f"compile.cache_dir={folder}" for folder in folders}
    for file, text in files.items():
        if file.endswith(".yaml"):
            _judge_yaml(text, plain[file], run, own)
        elif file.endswith(".toml"):
            assert _loaded(text) == values(run.config), file
        elif file.endswith(".py"):
            assert _shape(text) == _shape(plain[file])
        elif file.endswith(".sbatch"):
            _judge_script(text, plain[file], run)
        else:
            assert text == plain[file], f"{file} has a text of the user"
    return True


def _judge_yaml(text: str, plain: str, run: Job, own: set[str]) -> None:
    """Hold a file to a plain one: its fields are the same, and its texts too, but for those of the user."""
    assert text.isascii()
    documents, expected = (list(yaml.safe_load_all(each)) for each in (text, plain))
    fields, plain_fields = (list(texts_and_paths(each)) for each in (documents, expected))
    assert {path for path, _ in fields} == {path for path, _ in plain_fields}
    known = {value for _, value in plain_fields}
    for path, value in fields:
        read = expanded(str(value)) if "/args/" in path else value
        assert value in known or read in own or run.name in str(value), (path, value)
    for document in documents:
        if document.get("kind") == "ConfigMap":
            assert _loaded(document["data"][CONFIG_FILE]) == values(run.config)


def _judge_script(text: str, plain: str, run: Job) -> None:
    """Hold a job script to a plain one: they differ by the name of the job, and by the words of one command."""
    line = f"set -- {shlex.join([str(run.path), *run.overrides, f'--nproc={run.nproc}'])}\n"
    assert text.count(f"\n{line}") == 1
    assert shlex.split(line)[2:] == [str(run.path), *run.overrides, f"--nproc={run.nproc}"]
    rest = text.replace(line, "").replace(f"--job-name={run.name} ", "--job-name= ")
    assert rest == re.sub(r"set -- .*\n", "", re.sub(r"--job-name=\S+ ", "--job-name= ", plain))


def _loaded(text: str) -> dict[str, Any]:
    file = Path("/tmp") / f"nxtrain-test-{os.getpid()}.toml"
    try:
        file.write_text(text, encoding="utf-8")
        return values(load(file, ()).config)
    finally:
        file.unlink()


@settings(max_examples=200)
@given(NASTY)
def test_kubernetes_expands_nothing_in_an_argument(text: str) -> None:
    assert expanded(kubernetes.literal(text)) == text


def test_kubernetes_would_expand_what_is_not_escaped() -> None:
    assert expanded("$(HOME) $$ $(NONE) $HOME") == "/root $ $(NONE) $HOME"


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from("abc"), NASTY, min_size=1))
def test_yaml_reads_back(table: dict[str, str]) -> None:
    assert yaml.safe_load(dump_yaml([table])) == table


@pytest.mark.parametrize("text", ["1e3", "0o7", "y", "N", "on", "null", "0x1F", "1_000", "12:30", "True"])
def test_what_parsers_read_differently_is_quoted(text: str) -> None:
    assert dump_yaml([{"key": text}]) == f'key: "{text}"\n'


def in_bash(script: str, *argv: str, folder: Path, **environ: str) -> subprocess.CompletedProcess[bytes]:
    env = {"PATH": f"{folder}:{os.environ['PATH']}", **environ}
    return subprocess.run(
        ["bash", "-c", script, *argv], capture_output=True, cwd=folder, env=env, check=False, timeout=20
    )


def test_slurms_script_has_arguments_as_they_were_given(tmp_path: Path) -> None:
    @settings(max_examples=25)
    @given(st.lists(NASTY, min_size=1, max_size=4), NASTY)
    def check(names: list[str], path: str) -> None:
        run = job(*(f"run.name={toml_value(name)}" for name in names))
        script = RENDERERS["slurm"](replace(run, path=Path(path)))["train.sbatch"]
        head = script[: script.index("\nset -- ")].split("\n")  # sbatch reads no directive after the first command
        directives = [line for line in head if not line.startswith("# ") and line not in {"#", "#!/bin/bash"}]
        assert len(directives) == 2
        assert all(re.fullmatch(r"#SBATCH( --[a-z-]+(=[a-zA-Z0-9:@-]+)?)+", line) for line in directives), directives
        until = script.index("\nfirst=")
        done = in_bash(script[:until] + '\nprintf "%s\\0" "$@"', folder=tmp_path, HOME="/root")
        assert done.returncode == 0, done.stderr
        given_arguments = (str(Path(path)), *run.overrides, f"--nproc={run.nproc}")
        assert done.stdout.decode().split("\0")[:-1] == [*given_arguments]
        assert list(tmp_path.iterdir()) == []

    check()


@settings(max_examples=40)
@given(name=NASTY, image=NASTY)
def test_the_sagemaker_script_calls_the_estimator_with_the_texts(name: str, image: str) -> None:
    run = job(f"run.name={toml_value(name)}", "checkpoint.mirror=s3://a/b", options=Options(image=image))
    files = RENDERERS["sagemaker"](run)
    plain = RENDERERS["sagemaker"](job("run.name=plain", "checkpoint.mirror=s3://a/b"))
    assert _shape(files["sagemaker_job.py"]) == _shape(plain["sagemaker_job.py"])
    assert _loaded(files[CONFIG_FILE])["run.name"] == name
    called = _call(files["sagemaker_job.py"])
    assert called["image_uri"] == image
    assert called["instance_type"], called["instance_count"] == ("ml.trn1.32xlarge", 4)
    assert called["container_arguments"][0] == "/opt/ml/input/data/config/run.toml"


def _shape(text: str) -> str:
    """Program with its constants left out."""
    return re.sub(r"Constant\(value=.*?\)(?=[,\])])", "Constant()", ast.dump(_Blank().visit(ast.parse(text))))


class _Blank(ast.NodeTransformer):
    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        return ast.copy_location(ast.Constant(0), node)


def _call(text: str) -> dict[str, Any]:
    """Arguments that the script gives the estimator."""
    called: dict[str, Any] = {}

    class Estimator:
        latest_training_job = types.SimpleNamespace(name="job")

        def __init__(self, **arguments: Any) -> None:
            called.update(arguments)

        def fit(self, inputs: Mapping[str, str], wait: bool) -> None:
            called["inputs"] = inputs

    uploader = types.SimpleNamespace(upload=lambda file, place: place)
    modules = {
        "sagemaker": types.ModuleType("sagemaker"),
        "sagemaker.estimator": types.SimpleNamespace(Estimator=Estimator),
        "sagemaker.s3": types.SimpleNamespace(S3Uploader=uploader),
    }
    environ = {"ROLE": "role", "BUCKET": "bucket"}
    with pytest.MonkeyPatch.context() as patch:
        for module, fake in modules.items():
            patch.setitem(sys.modules, module, fake)
        for variable, value in environ.items():
            patch.setenv(variable, value)
        patch.delenv("IMAGE", raising=False)
        patch.setattr("builtins.print", lambda *_: None)
        exec(compile(text, "sagemaker_job.py", "exec"), {"__file__": "/x/sagemaker_job.py"})
    return called


# The process of a pod

NXTRAIN = """#!/bin/bash
echo "$@" >>calls
[ "$1" = "${FAILING:-none}" ] && exit $CODE
[ "$1" = "${SLOW:-none}" ] || exit 0
trap 'echo stopped >>calls; exit 75' TERM
touch there
while :; do sleep 0.02; done
"""


@pytest.fixture
def pod(tmp_path: Path) -> Path:
    """Folder with a program `nxtrain` that records its calls."""
    program = tmp_path / "nxtrain"
    program.write_text(NXTRAIN, encoding="ascii")
    program.chmod(0o755)
    return tmp_path


def entry(kind: str) -> list[str]:
    """Command of a pod, as Kubernetes hands it on."""
    spec = yaml.safe_load(list(kubernetes.render(job())[kind].split("\n---\n"))[1])["spec"]
    if kind == "pytorchjob.yaml":
        template = spec["pytorchReplicaSpecs"]["Worker"]["template"]
    else:
        template = spec["replicatedJobs"][0]["template"]["spec"]["template"]
    return [expanded(word) for word in template["spec"]["containers"][0]["command"]]


@pytest.mark.parametrize(
    ("kind", "failing", "code", "expected"),
    [
        ("pytorchjob.yaml", "none", 0, 0),
        ("pytorchjob.yaml", "launch", 2, 2),
        ("pytorchjob.yaml", "launch", 75, 203),
        ("pytorchjob.yaml", "launch", 1, 129),
        ("pytorchjob.yaml", "launch", 139, 139),
        ("pytorchjob.yaml", "compile", 5, 5),
        ("jobset.yaml", "launch", 75, 75),
        ("jobset.yaml", "launch", 6, 6),
    ],
)
def test_a_pod_compiles_before_it_runs_and_ends_with_a_code_for_its_operator(
    pod: Path, kind: str, failing: str, code: int, expected: int
) -> None:
    done = in_bash(*entry(kind)[2:], "run.toml", "a b", folder=pod, FAILING=failing, CODE=str(code))
    assert done.returncode == expected, done.stderr
    calls = ["compile run.toml a b", "launch run.toml a b"]
    assert (pod / "calls").read_text().splitlines() == calls[: 1 if failing == "compile" else 2]


def test_a_pod_passes_the_signal_on_and_waits_for_the_save(pod: Path) -> None:
    command = entry("pytorchjob.yaml")
    env = {"PATH": f"{pod}:{os.environ['PATH']}", "SLOW": "launch"}
    with subprocess.Popen([*command, "run.toml"], cwd=pod, env=env) as process:
        try:
            for _ in range(1000):
                if (pod / "there").exists():
                    break
                process.poll()
                subprocess.run(["sleep", "0.01"], check=True)
            process.terminate()
            assert process.wait(20) == 75 + 128
        finally:
            process.kill()
    assert (pod / "calls").read_text().splitlines()[-1] == "stopped"


# Rules


@pytest.mark.parametrize(
    ("overrides", "options", "said"),
    [
        (("cluster.instance=",), Options(), "not set, and the machines of the cluster are not this one"),
        (("cluster.instance=trn1.32xl",), Options(), "did you mean trn1.32xlarge?"),
        (("cluster.instance=p5.48xlarge",), Options(), "p5.48xlarge has no devices for backend.name=neuron"),
        (("backend.name=neuron-native", "backend.layers=native"), Options(), "TorchNeuron is for Trn2 and Trn3 only"),
        (("cluster.instance=trn1.2xlarge",), Options(nproc=2), "trn1.2xlarge has no EFA device to join them"),
        (("cluster.nodes=7",), Options(), "128 ranks, as the degrees ask for, do not divide over 7 nodes"),
        (("backend.name=auto", "cluster.instance=trn1.32xlrge"), Options(), "did you mean trn1.32xlarge?"),
        (("backend.name=cpu", "cluster.instance=m5 x"), Options(), "'m5 x' is no label of machines"),
        ((), Options(claim=""), "--claim is empty"),
        ((), Options(nproc=64), "64 ranks per machine, but trn1.32xlarge has 32"),
        ((), Options(min_nodes=2), "with --min-nodes the number of replicas follows"),
        (("parallel.dp=0",), Options(min_nodes=2), "compiled for one number of ranks"),
        (("parallel.dp=0",), Options(min_nodes=4), "leaves none that may be lost"),
        (("parallel.dp=5",), Options(), "train.global_batch"),
    ],
)
def test_what_no_cluster_can_run_is_refused(overrides: tuple[str, ...], options: Options, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        job(*overrides, options=options)
    assert said in str(raised.value)


def test_what_an_operator_gives_in_vain_is_refused(tmp_path: Path) -> None:
    cases = {
        "--out": ("--out", str(tmp_path / "deploy")),
        "--image": ("--image", "a"),
        "--first-node": ("--target", "slurm", "--dry-run", "--first-node", "n1:29501"),
        "a path is empty": ("--target", "slurm", "--out", ""),
        "'0' is no port": ("--first-node", "n1:0"),
        "'n1:²'": ("--first-node", "n1:²"),
        "'n1\\ntouch owned'": ("--dry-run", "--first-node", "n1\ntouch owned"),
        "'' is no machine": ("--first-node", ":29500"),
        "'-x' is no machine": ("--first-node=-x",),
    }
    for said, argv in cases.items():
        code, out, err = in_process("launch", RECIPE, *argv)
        assert (code, out) == (2, "")
        assert said in err.replace("\n", " "), err
    assert list(tmp_path.iterdir()) == []


def test_files_that_another_launch_left_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for target, left in (("kubernetes", ""), ("hyperpod", "mpijob.yaml, jobset.yaml"), ("kubernetes", "train.sbatch")):
        launch_on(target, Path(RECIPE), SMALL, Options(), out=tmp_path, dry_run=False)
        said = capsys.readouterr()
        assert said.err == (f"{tmp_path} also has {left} of another launch; delete what is not meant\n" if left else "")
    written = [{Path(key).name for key in plain_texts(config)} for config in PLAIN]
    assert set.union(*written) == set(NAMES)


def test_notes_of_a_command_stay_comments() -> None:
    assert str(Command(("true",), about=("one\ntouch owned",))) == "# one\n# touch owned\ntrue"


def test_machines_of_sagemaker_need_a_mirror() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.mirror"):
        RENDERERS["sagemaker"](job())


@pytest.mark.parametrize(
    ("name", "label"),
    [("Llama_2 7B!", "llama-2-7b"), ("9x", "run-9x"), ("___", "run"), (f"a{'-b' * 19}c", f"a{'-b' * 19}c")],
)
def test_the_name_of_a_run_becomes_a_label(name: str, label: str) -> None:
    assert job(f"run.name={toml_value(name)}").name == label


@given(st.lists(st.text("ab\xe9\u8bad", max_size=60).map(lambda end: f"a{end}"), min_size=2, max_size=2, unique=True))
@settings(max_examples=20)
def test_names_that_a_label_cannot_hold_stay_apart(names: list[str]) -> None:
    labels = [job(f"run.name={toml_value(name)}").name for name in names]
    assert len(set(labels)) == 2
    assert all(re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", label) for label in labels)


def test_ranks_fill_the_machine_where_the_degrees_follow_it() -> None:
    assert job("parallel.dp=0").nproc == MACHINES["trn1.32xlarge"].ranks
    assert resolve_job(ROOT / "configs/demo.toml", (), Options()).nproc == 2


def test_graphs_are_compiled_on_the_disk_of_the_node() -> None:
    for given_folder, folder in (("/nvme/graphs", "/nvme/graphs"), ("compile_cache/{host}", kubernetes.CACHE)):
        text = kubernetes.render(job(f"compile.cache_dir={given_folder}"))["pytorchjob.yaml"]
        manifest = list(yaml.safe_load_all(text))[1]
        pod = manifest["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
        assert pod["volumes"][-1]["hostPath"]["path"] == folder
        arguments = pod["containers"][0]["args"]
        assert (f"compile.cache_dir={folder}" in arguments) == (given_folder != folder)


def test_agents_of_an_elastic_run_take_a_range_of_machines() -> None:
    demo = ROOT / "configs/demo.toml"
    overrides = ["cluster.nodes=4", "parallel.dp=0", "train.global_batch=24"]
    command = render_local(demo, overrides, 1, {}, first_node="n1", min_nodes=2)
    assert "--nnodes=2:4" in command.argv
    assert "--nnodes=4" in render_local(demo, overrides, 1, {}, first_node="n1").argv
    with pytest.raises(ConfigError, match=r"use parallel\.dp=0"):
        render_local(demo, [*overrides, "parallel.dp=4"], 1, {}, first_node="n1", min_nodes=2)
