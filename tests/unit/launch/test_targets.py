"""Files for clusters: the kept ones are rendered, and no text of a user means anything in them but itself."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import run
from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config

from nxtrain.cli import launch as launch_command
from nxtrain.common.errors import ConfigError
from nxtrain.common.machines import INSTANCE_TYPES
from nxtrain.config.check import MOST_NAME_BYTES
from nxtrain.config.load import load, values
from nxtrain.config.tables import toml_value
from nxtrain.launch.targets import kubernetes
from nxtrain.launch.targets.job import CONFIG_FILE, ClusterJob, LaunchOptions, resolve_job
from nxtrain.launch.targets.render import RENDERERS
from nxtrain.launch.targets.yaml_text import dump_yaml
from tests.support import ROOT
from tests.support.launch_cases import CASES, GOLDEN, all_files

VALIDATED = GOLDEN / "validated.json"
JUDGES = {
    r"/(pytorchjob|mpijob|jobset)\.yaml$": {"CRD", "kubectl", "kubernetes-validate"},
    r"/(fsx-static|fsx-dynamic|efs)\.yaml$": {"kubectl", "kubernetes-validate"},
    r"/eks(_trn1)?\.yaml$": {"eksctl,", "parliament"},
    r"/parallelcluster": {"aws-parallelcluster"},
    r"/sagemaker_job": {"sagemaker"},
    r"/Dockerfile": {"hadolint"},
}
"""Validators that each kind of file needs."""

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
NAMES = NASTY.filter(lambda text: not re.search(r"^[\s.]*$|[/\x00-\x1f\x7f-\x9f\u2028\u2029]", text)).filter(
    lambda text: len(text.encode()) <= MOST_NAME_BYTES
)
"""Texts that may be names of runs."""


def job(*overrides: str, options: LaunchOptions = LaunchOptions()) -> ClusterJob:  # noqa: B008
    return resolve_job(Path(RECIPE), (*SMALL, *overrides), options)


# Kept files


def test_kept_files_are_rendered() -> None:
    expected = {path: path.read_text(encoding="ascii") for path in GOLDEN.rglob("*") if path.parent != GOLDEN}
    actual = all_files()
    assert set(expected) == {path for path in actual if path.is_relative_to(GOLDEN)}
    stale = [str(path.relative_to(ROOT)) for path, text in actual.items() if path.read_text(encoding="ascii") != text]
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
        judges = {judge.partition(" ")[0] for judge in judged[name]["by"]}
        (needed,) = [wanted_by for pattern, wanted_by in JUDGES.items() if re.search(pattern, name)]
        assert judges == needed, name


def test_the_command_offers_every_target() -> None:
    choices = get_args(get_type_hints(launch_command.launch)["target"])
    assert set(choices) == {"local", *RENDERERS}
    assert {case.target for case in CASES.values()} == set(RENDERERS)


# Inert texts


def expanded(text: str) -> str:
    """Text as Kubernetes expands it with HOME defined, after k8s.io/kubernetes/third_party/forked/golang/expansion."""

    def one(result: re.Match[str]) -> str:
        if result[0] == "$$":
            return "$"
        return "/root" if result[1] == "HOME" else result[0]

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
@given(name=NAMES, folder=TEXTS, image=NASTY, claim=NASTY)
def test_every_text_is_itself_in_manifests_and_no_field_appears(name: str, folder: str, image: str, claim: str) -> None:
    overrides = (f"run.name={toml_value(name)}", f"compile.cache_dir={toml_value(f'/{folder}')}")
    run = job(*overrides, options=LaunchOptions(image=image, claim=claim))
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
        loaded = loaded_values(config["data"][CONFIG_FILE])
        assert loaded["run.name"] == name


def loaded_values(text: str) -> dict[str, Any]:
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
        ["bash", "-c", script, *argv], capture_output=True, cwd=folder, env=env, check=False, timeout=60
    )


def test_slurms_script_has_arguments_as_they_were_given(tmp_path: Path) -> None:
    @settings(max_examples=25)
    @given(st.lists(NASTY, min_size=1, max_size=4), NASTY)
    def check(names: list[str], path: str) -> None:
        run = job(*(f"metrics.mlflow={toml_value(name)}" for name in names))
        script = RENDERERS["slurm"](replace(run, path=Path(path)))["train.sbatch"]
        head = script[: script.index("\nset -- ")].split("\n")  # sbatch reads no directive after the first command
        directives = [line for line in head if not line.startswith("# ") and line not in {"#", "#!/bin/bash"}]
        assert len(directives) == 2
        assert all(re.fullmatch(r"#SBATCH( --[a-z-]+(=[a-zA-Z0-9:@%.-]+)?)+", line) for line in directives), directives
        until = script.index("\nfirst=")
        done = in_bash(script[:until] + '\nprintf "%s\\0" "$@"', folder=tmp_path, HOME="/root")
        assert done.returncode == 0, done.stderr
        given_arguments = (str(Path(path)), *run.overrides, f"--nproc={run.nproc}")
        assert done.stdout.decode().split("\0")[:-1] == [*given_arguments]
        assert list(tmp_path.iterdir()) == []

    check()


@settings(max_examples=40)
@given(name=NAMES, image=NASTY)
def test_the_sagemaker_script_calls_the_estimator_with_the_texts(name: str, image: str) -> None:
    run = job(f"run.name={toml_value(name)}", "checkpoint.mirror=s3://a/b", options=LaunchOptions(image=image))
    files = RENDERERS["sagemaker"](run)
    plain = RENDERERS["sagemaker"](job("run.name=plain", "checkpoint.mirror=s3://a/b"))
    assert shape_of(files["sagemaker_job.py"]) == shape_of(plain["sagemaker_job.py"])
    assert loaded_values(files[CONFIG_FILE])["run.name"] == name
    called = _call(files["sagemaker_job.py"])
    assert called["image_uri"] == image
    assert (called["instance_type"], called["instance_count"]) == ("ml.trn1.32xlarge", 4)
    assert called["container_arguments"][0] == "/opt/ml/input/data/config/run.toml"


def shape_of(text: str) -> str:
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

    uploader = types.SimpleNamespace(upload=lambda file, target: target)
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
trap 'sleep 0.2; echo stopped >>calls; exit 75' TERM USR1
touch there
while :; do sleep 0.02; done
"""

MPIRUN = """#!/bin/bash
path=/usr/bin:/bin
while [ "$1" != nxtrain ]; do [ "$1 $2" = "-x PATH" ] && path=$PATH; shift; done
env PATH="$path" "$@" & pid=$!
trap 'kill -USR1 $pid' USR1
trap 'kill -KILL $pid' TERM
wait $pid; code=$?
while kill -0 $pid 2>/dev/null; do wait $pid; code=$?; done
exit $code
"""
"""Open MPI 4.1: its agents have the PATH of sshd, it passes SIGUSR1 on, and kills ranks a second after SIGTERM."""


GETENT = """#!/bin/bash
[ -e known ] || { echo "$@" >>asked; touch known; exit 2; }
"""
"""Name service that knows the first pod, but for the first call if there is no file `known`."""


@pytest.fixture
def pod(tmp_path: Path) -> Path:
    """Folder with a program `nxtrain` that records its calls, and stand-ins for `mpirun` and the name service."""
    for name, text in {"nxtrain": NXTRAIN, "mpirun": MPIRUN, "getent": GETENT}.items():
        program = tmp_path / name
        program.write_text(text, encoding="ascii")
        program.chmod(0o755)
    (tmp_path / "known").touch()
    return tmp_path


def entry(kind: str) -> list[str]:
    """Command of a pod, as Kubernetes hands it on."""
    spec = yaml.safe_load(list(kubernetes.render(job())[kind].split("\n---\n"))[1])["spec"]
    if kind == "pytorchjob.yaml":
        template = spec["pytorchReplicaSpecs"]["Worker"]["template"]
    elif kind == "mpijob.yaml":
        template = spec["mpiReplicaSpecs"]["Launcher"]["template"]
    else:
        template = spec["replicatedJobs"][0]["template"]["spec"]["template"]
    return [expanded(word) for word in template["spec"]["containers"][0]["command"]]


@pytest.mark.parametrize(
    ("kind", "failing", "code", "expected"),
    [
        ("pytorchjob.yaml", "launch", 75, 203),
        ("pytorchjob.yaml", "compile", 5, 5),
        ("jobset.yaml", "launch", 75, 75),
        ("mpijob.yaml", "launch", 75, 75),
        ("mpijob.yaml", "compile", 5, 5),
    ],
)
def test_a_pod_compiles_before_it_runs_and_ends_with_a_code_for_its_operator(
    pod: Path, kind: str, failing: str, code: int, expected: int
) -> None:
    done = in_bash(*entry(kind)[2:], "run.toml", "a b", folder=pod, FAILING=failing, CODE=str(code))
    assert done.returncode == expected, done.stderr
    calls = ["compile run.toml a b", "launch run.toml a b"]
    assert (pod / "calls").read_text().splitlines() == calls[: 1 if failing == "compile" else 2]


@pytest.mark.parametrize("kind", ["pytorchjob.yaml", "jobset.yaml"])
def test_a_pod_waits_for_the_machine_of_the_first(pod: Path, kind: str) -> None:
    """An agent that cannot connect ends with 5 after minutes, on which the operator gives the job up."""
    text = kubernetes.render(job())[kind]
    (name,) = set(re.findall(r"--first-node=(.*):29500", text))
    (pod / "known").unlink()
    done = in_bash(*entry(kind)[2:], "run.toml", folder=pod)
    assert done.returncode == 0, done.stderr
    assert (pod / "asked").read_text().splitlines() == [f"hosts {name}"]
    assert (pod / "calls").read_text().splitlines() == ["compile run.toml", "launch run.toml"]
    alone = kubernetes.render(job("cluster.nodes=1", "parallel.dp=4"))[kind]
    assert "getent" not in alone
    assert "PET_RDZV_CONF" not in alone


def test_agents_of_pods_wait_for_each_other_for_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = yaml.safe_load(list(kubernetes.render(job())["pytorchjob.yaml"].split("\n---\n"))[1])["spec"]
    (container,) = spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    for variable in container["env"]:
        monkeypatch.setenv(variable["name"], variable["value"])
    options = run.parse_args(["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=n1:29500", "train.py"])
    assert _parse_rendezvous_config(options.rdzv_conf) == {"join_timeout": "86400"}


@pytest.mark.parametrize(("kind", "code"), [("pytorchjob.yaml", 75 + 128), ("jobset.yaml", 75), ("mpijob.yaml", 75)])
def test_a_pod_passes_the_signal_on_and_waits_for_the_save(pod: Path, kind: str, code: int) -> None:
    command = entry(kind)
    env = {"PATH": f"{pod}:{os.environ['PATH']}", "SLOW": "launch"}
    with subprocess.Popen([*command, "run.toml"], cwd=pod, env=env) as process:
        try:
            for _ in range(1000):
                if (pod / "there").exists():
                    break
                process.poll()
                subprocess.run(["sleep", "0.01"], check=True)
            process.terminate()
            assert process.wait(20) == code
        finally:
            process.kill()
    assert (pod / "calls").read_text().splitlines()[-1] == "stopped"


# Rules


@pytest.mark.parametrize(
    ("overrides", "options", "said"),
    [
        (("cluster.instance=",), LaunchOptions(), "not set, but the cluster's machines differ from this machine"),
        (("cluster.instance=trn1.32xl",), LaunchOptions(), "did you mean trn1.32xlarge?"),
        (("cluster.instance=p5.48xlarge",), LaunchOptions(), "p5.48xlarge has no devices for backend.name=neuron"),
        (
            ("backend.name=neuron-native", "backend.layers=native"),
            LaunchOptions(),
            "TorchNeuron is for Trn2 and Trn3 only",
        ),
        (("cluster.instance=trn1.2xlarge",), LaunchOptions(nproc=2), "trn1.2xlarge has no EFA device to join them"),
        (("cluster.nodes=7",), LaunchOptions(), "128 ranks, from the parallel degrees, do not divide over 7 nodes"),
        (("backend.name=auto", "cluster.instance=trn1.32xlrge"), LaunchOptions(), "did you mean trn1.32xlarge?"),
        (("backend.name=cpu", "cluster.instance=m5 x"), LaunchOptions(), "'m5 x' is not a label"),
        ((), LaunchOptions(claim=""), "--claim is empty"),
        ((), LaunchOptions(nproc=64), "64 ranks per machine, but trn1.32xlarge has 32"),
        ((), LaunchOptions(min_nodes=2), "with --min-nodes the number of replicas depends"),
        (("parallel.dp=0",), LaunchOptions(min_nodes=2), "compiled for one number of ranks"),
        (("parallel.dp=0",), LaunchOptions(min_nodes=4), "no machine may be lost"),
        (("parallel.dp=5",), LaunchOptions(), "train.global_batch"),
    ],
)
def test_what_no_cluster_can_run_is_refused(overrides: tuple[str, ...], options: LaunchOptions, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        job(*overrides, options=options)
    assert said in str(raised.value)


def test_machines_of_sagemaker_need_a_mirror() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.mirror"):
        RENDERERS["sagemaker"](job())


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("llama2_7b", "llama2-7b"),
        ("Llama_2 7B!", "llama-2-7b-[0-9a-f]{6}"),
        ("9x", "run-9x-[0-9a-f]{6}"),
        ("___", "run-[0-9a-f]{6}"),
        (f"a{'-b' * 19}c", f"a{'-b' * 19}c"),
    ],
)
def test_the_name_of_a_run_becomes_a_label(name: str, label: str) -> None:
    assert re.fullmatch(label, job(f"run.name={toml_value(name)}").name)


def test_ranks_fill_the_machine_where_the_degrees_follow_it() -> None:
    assert job("parallel.dp=0").nproc == INSTANCE_TYPES["trn1.32xlarge"].devices
    assert resolve_job(ROOT / "configs/demo.toml", (), LaunchOptions()).nproc == 2


def test_graphs_are_compiled_on_the_disk_of_the_node() -> None:
    for given_folder, folder in (("/nvme/graphs", "/nvme/graphs"), ("compile_cache/{host}", kubernetes.CACHE)):
        text = kubernetes.render(job(f"compile.cache_dir={given_folder}"))["pytorchjob.yaml"]
        manifest = list(yaml.safe_load_all(text))[1]
        pod = manifest["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
        assert pod["volumes"][-1]["hostPath"]["path"] == folder
        arguments = pod["containers"][0]["args"]
        assert (f"compile.cache_dir={folder}" in arguments) == (given_folder != folder)
