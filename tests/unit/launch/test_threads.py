"""Threads of a rank: their number and their way to wait, for drawn models, and each value that a shell has."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from nxtrain.backends.base import Support
from nxtrain.cli.main import app
from nxtrain.common.family import find_family
from nxtrain.config.load import load
from nxtrain.launch import neuron, threads
from nxtrain.launch.neuron import reexec_with_environment
from tests.support import DEMO, TINY
from tests.support.launch_cases import local_command
from tests.unit.launch.conftest import Program

PASSIVE = {"OMP_WAIT_POLICY": "passive"}
OPS = 128_000_000


def on_cores(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    monkeypatch.setattr(threads, "num_cores", lambda: cores)


@pytest.mark.parametrize("seed", range(8))
def test_the_number_follows_the_products_of_a_block_up_to_the_ranks_share(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    draw = random.Random(seed)
    width, inner = 64 * draw.randint(1, 64), 64 * draw.randint(1, 128)
    length, batch, tp, cores = 64 * draw.randint(1, 16), draw.randint(1, 8), draw.choice([1, 2]), draw.randint(2, 64)
    on_cores(monkeypatch, cores)
    shape = {"hidden_size": width, "intermediate_size": inner, "num_attention_heads": 4, "num_key_value_heads": 2}
    overrides = [f"model.config.{key}={value}" for key, value in shape.items()]
    overrides += [f"train.seq_len={length}", "model.config.max_position_embeddings=4096", f"parallel.tp={tp}"]
    overrides += [f"train.micro_batch={batch}", f"train.global_batch={batch}", "parallel.dp=1"]
    # Two operations for each entry of a matrix, and causal attention: half of two products of S x S by the width.
    entries = width * width * 2 + 2 * width * width // 2 + 3 * width * inner
    operations = (2 * entries + 2 * width * length) * batch * length / tp
    wanted = min(max(1, cores // tp), max(1, int(operations // OPS)))
    actual = local_command(TINY, overrides, None, {}).env
    assert actual == {"OMP_NUM_THREADS": str(wanted), **(PASSIVE if wanted > 1 else {})}


def test_a_small_model_has_one_thread_which_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cores(monkeypatch, 7)
    for config in (TINY, DEMO):
        assert local_command(config, (), None, {}).env == {"OMP_NUM_THREADS": "1"}
        (threads_of_model,) = local_command(config, (), None, {}).variables
        assert "a block of this model keeps no more threads busy" in threads_of_model.reason
    large = ["model.config.hidden_size=1024", "train.micro_batch=1", "train.global_batch=16", "parallel.dp=16"]
    (share,) = local_command(DEMO, large, 16, {}).variables
    assert (share.name, share.value) == ("OMP_NUM_THREADS", "1"), "of 7 cores each of 16 ranks has one"
    assert share.reason.startswith("ranks that each use all cores")


SHELLS = {"OMP_NUM_THREADS": ("1", "5", "4,2"), "OMP_WAIT_POLICY": ("active", "passive"), "GOMP_SPINCOUNT": ("7",)}


@pytest.mark.parametrize(
    "shell",
    [
        dict(pairs)
        for size in (1, 2, 3)
        for names in itertools.combinations(SHELLS, size)
        for pairs in itertools.product(*([(name, value) for value in SHELLS[name]] for name in names))
    ],
    ids=str,
)
def test_the_shells_values_win_in_a_launch_and_in_a_lone_rank(
    monkeypatch: pytest.MonkeyPatch, started: list[Program], shell: dict[str, str]
) -> None:
    on_cores(monkeypatch, 8)
    large = ["model.config.hidden_size=1024", "model.config.intermediate_size=4096"]
    reexec_with_environment(load(TINY, large).config, shell, local_world=1)
    alone = started.pop().environ if started else shell
    assert alone == {**shell, **local_command(TINY, large, None, shell).env}
    assert alone.items() >= shell.items()
    assert "OMP_NUM_THREADS" in alone
    is_waiting_chosen = "OMP_WAIT_POLICY" in shell or "GOMP_SPINCOUNT" in shell
    if not is_waiting_chosen:
        assert alone.get("OMP_WAIT_POLICY", "") == ("" if alone["OMP_NUM_THREADS"] == "1" else "passive")
    reexec_with_environment(load(TINY, large).config, alone, local_world=1)
    assert not started, "a rank starts anew once"


def test_hosts_of_neuron_devices_wait_as_before(monkeypatch: pytest.MonkeyPatch, started: list[Program]) -> None:
    on_trn2 = ["backend.name=neuron", "cluster.instance=trn2.48xlarge"]
    assert "OMP_WAIT_POLICY" not in local_command(TINY, on_trn2, None, {}).env
    monkeypatch.setattr(neuron, "support", lambda: Support(False, "no chip in this test"))
    reexec_with_environment(load(TINY, on_trn2).config, {}, local_world=1)
    assert not started


def test_the_openmp_of_torch_reads_the_variable() -> None:
    # OMP_DISPLAY_ENV is the OpenMP library's own account of what it has read.
    shell = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    chosen = threads.thread_variables(load(TINY, ()).config, {"OMP_NUM_THREADS": "2"}, 1)
    argv = [sys.executable, "-c", "import torch; torch.ones(9) @ torch.ones(9)"]
    env = {
        **shell,
        **{choice.name: choice.value for choice in chosen},
        "OMP_NUM_THREADS": "2",
        "OMP_DISPLAY_ENV": "verbose",
    }
    said = subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stderr
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in said
    assert "OMP_NUM_THREADS = '2'" in said
    assert "GOMP_SPINCOUNT = '0'" in said


@pytest.mark.parametrize("seed", range(8))
def test_the_number_of_inference_follows_the_tokens_at_once_or_the_read_of_the_weights(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    draw = random.Random(seed)
    width, inner, tokens = 64 * draw.randint(1, 64), 64 * draw.randint(1, 256), draw.choice([1, 5, 8, 20, 1024])
    cores, ranks = draw.randint(2, 64), draw.choice([1, 2])
    on_cores(monkeypatch, cores)
    llama = find_family("llama")
    model = llama.config_type.model_validate(
        {"vocab_size": 300, "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": 2}
        | {"num_attention_heads": 4, "num_key_value_heads": 2}
    )
    entries = width * width * 2 + 2 * width * width // 2 + 3 * width * inner
    operations = (2 * entries + 2 * width) * max(tokens, 8)
    wanted = min(max(1, cores // ranks), max(1, operations // OPS))
    actual = {
        variable.name: variable.value for variable in threads.inference_variables((llama, model), tokens, {}, ranks)
    }
    assert actual == {"OMP_NUM_THREADS": str(wanted), **(PASSIVE if wanted > 1 else {})}
    unknown = {variable.name: variable.value for variable in threads.inference_variables(None, tokens, {}, ranks)}
    share = max(1, cores // ranks)
    assert unknown == {"OMP_NUM_THREADS": str(share), **(PASSIVE if share > 1 else {})}


@pytest.mark.parametrize("shell", [{"OMP_NUM_THREADS": "5"}, {"OMP_NUM_THREADS": "1"}, {"OMP_WAIT_POLICY": "active"}])
def test_inference_starts_anew_once_and_the_shells_values_win(
    monkeypatch: pytest.MonkeyPatch, started: list[Program], shell: dict[str, str]
) -> None:
    on_cores(monkeypatch, 8)
    neuron.reexec_for_inference(None, 1, shell, local_world=1)
    result = started.pop().environ if started else shell
    assert result.items() >= shell.items()
    assert result["OMP_NUM_THREADS"] == shell.get("OMP_NUM_THREADS", "8")
    neuron.reexec_for_inference(None, 1, result, local_world=1)
    assert not started
    monkeypatch.setattr(neuron, "support", lambda: Support(True, "a device"))
    neuron.reexec_for_inference(None, 1, {}, local_world=1)
    assert not started, "hosts of Neuron devices wait as before"


@pytest.mark.parametrize(
    "argv",
    [
        ["generate", "/no/model", "--prompt", "a"],
        ["eval", "/no/model"],
        ["data", "teach", "/no/model", "--rows", "no.npy", "--out", "out.npy"],
    ],
    ids=["generate", "eval", "teach"],
)
def test_commands_that_run_a_model_choose_their_threads(
    monkeypatch: pytest.MonkeyPatch, started: list[Program], argv: list[str]
) -> None:
    on_cores(monkeypatch, 8)
    result = CliRunner().invoke(app, argv)
    assert result.exit_code != 0, "there is no such model"
    assert [program.environ["OMP_NUM_THREADS"] for program in started] == ["8"]
    assert started[0].environ["OMP_WAIT_POLICY"] == "passive"
