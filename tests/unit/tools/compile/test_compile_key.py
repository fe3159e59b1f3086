"""Settings of a run in its manifest: those that shape its graphs, and no others."""

from __future__ import annotations

import pytest

from nxtrain.config.check import resolve_config
from nxtrain.config.load import load
from nxtrain.tools.compile.compile_key import build_of
from nxtrain.tools.compile.manifest import Build, differ
from tests.support import TINY


def build(*overrides: str, world: int = 2, flags: str = "") -> Build:
    environ = {"NEURON_CC_FLAGS": flags, "NEURON_FUSE_SOFTMAX": "1", "NEURON_RT_EXEC_TIMEOUT": "7", "HOME": "there"}
    return build_of(resolve_config(load(TINY, ["train.micro_batch=4", *overrides]), world), world, environ)


@pytest.mark.parametrize(
    ("override", "difference"),
    [
        ("train.micro_batch=2", "train.micro_batch: compiled 4, needed 2"),
        ("train.seq_len=32", "train.seq_len: compiled 64, needed 32"),
        ("model.config.hidden_size=128", "model.config.hidden_size: compiled 64, needed 128"),
        ("train.eval_every=0", "train.eval_every: compiled 'set', needed 'never'"),
        ("optim.clip=0.5", "optim.clip: compiled 1.0, needed 0.5"),
        ("parallel.cp=2", "parallel.cp: compiled 1, needed 2"),
        ("parallel.cp=2 parallel.cp_layout=striped", "parallel.cp_layout: compiled 'auto', needed 'striped'"),
        ("parallel.sequence_parallel=true", "parallel.sequence_parallel: compiled False, needed True"),
    ],
)
def test_what_shapes_graphs_is_in_it(override: str, difference: str) -> None:
    assert difference in map(str, differ(build(), build(*override.split())))


@pytest.mark.parametrize(
    "override",
    [
        *(
            "run.name=b",
            "run.seed=7",
            "train.steps=7",
            "train.eval_every=3",
            "train.eval_batches=2",
            "checkpoint.every=9",
        ),
        *("optim.lr=1", "optim.warmup_steps=1", "data.shuffle=false", "metrics.log_every=1", "compile.on_miss=stop"),
        *("parallel.dp=2", "recovery.max_restarts=3", "cluster.instance=trn1.32xlarge", "checkpoint.keep=1"),
    ],
)
def test_what_shapes_none_is_not(override: str) -> None:
    assert build(override) == build()


def test_the_size_of_the_world_is_in_it_through_its_degrees() -> None:
    assert list(map(str, differ(build(), build(world=4)))) == ["parallel.dp: compiled 2, needed 4"]


def test_only_the_compilers_own_flags_are_in_it_with_their_values() -> None:
    flags = "--cache_dir /a --model-type transformer --log_level=INFO -O1 --retry_failed_compilation --dump /b --lnc=2"
    assert build(flags=flags).flags == ("--model-type", "transformer", "-O1", "--lnc=2")


def test_only_variables_that_change_graphs_are_in_it() -> None:
    assert [key for key in build().settings if key.isupper()] == ["NEURON_FUSE_SOFTMAX"]
