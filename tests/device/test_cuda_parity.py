"""The parity suite on NVIDIA GPUs, without TF32 against transformers on the CPU; and a step that never waits."""

from __future__ import annotations

import math
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from nxtrain.backends import choose, open_backend
from nxtrain.backends.base import Backend
from nxtrain.checkpoint import directory
from nxtrain.common.errors import BackendError
from nxtrain.common.mesh import Mesh
from nxtrain.common.run_folder import CHECKPOINTS_DIR
from nxtrain.metrics.status import KINDS_S, SECTIONS_S
from nxtrain.train.step import train_step
from tests.support.adamw import STEPS as NUM_UPDATES
from tests.support.adamw import ours, torchs
from tests.support.lora import adapters_of
from tests.support.models import BASE, SHAPES, changed, hf_model, our_model, plan, tokens, weights_of
from tests.support.parity import LR, Course, batches, check_course, layout, local_batch, reference, run_ours, start
from tests.support.ranks import RankPool
from tests.support.recovery import tensors
from tests.support.runs import course, records, run_plan, token_file, train_rank, write_toml

pytestmark = pytest.mark.cuda

STEPS = 20


@cache
def expected(shape: str) -> Course:
    """The reference course of a shape, run once, on the CPU."""
    return reference(layout(shape, tp=1), STEPS)


def test_auto_takes_the_gpu() -> None:
    assert choose("auto")[0] == "cuda"


@pytest.mark.parametrize("shape", SHAPES)
def test_float32_logits_equal_transformers(backend: Backend, shape: str) -> None:
    resolved = plan(shape)
    inputs = tokens(resolved, batch=2)[:, :-1].contiguous()
    with torch.no_grad():
        want = hf_model(resolved)(input_ids=inputs).logits
    model = our_model(resolved, backend, Mesh.build(1, 0), weights_of(resolved))
    actual = model.logits(backend.put(inputs))  # type: ignore[operator]
    assert (actual.cpu() - want).abs().max() < 1e-5


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("shape", ["gqa2", "odd", "tied"])
def test_twenty_float32_steps_equal_transformers(backend: Backend, shape: str, accumulation: int) -> None:
    resolved = layout(shape, tp=1, micro=4 // accumulation)
    check_course([run_ours(backend, resolved, STEPS, weights_of(resolved))], expected(shape), resolved)


def test_bf16_steps_stay_finite_and_begin_where_float32_does(backend: Backend) -> None:
    resolved = layout("gqa2", tp=1, params="bf16")
    actual = run_ours(backend, resolved, STEPS, weights_of(resolved))
    assert all(map(math.isfinite, [*actual.losses, *actual.norms]))
    assert actual.losses[0] == pytest.approx(expected("gqa2").losses[0], rel=2**-8)
    assert actual.losses[-1] == pytest.approx(expected("gqa2").losses[-1], rel=0.02)


def test_fused_adamw_equals_torch_on_the_cpu(backend: Backend) -> None:
    optimizer, parameters = ours(backend.kernels, torch.float32, "fp32", backend.put)
    _, want = torchs(torch.float32)
    assert optimizer.num_updates.tolist() == [NUM_UPDATES, NUM_UPDATES]
    for name, parameter in want.items():
        torch.testing.assert_close(parameters[name].detach().cpu(), parameter.detach(), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("update", "method"),
    [
        ("fp32", "full"),
        ("fp32_master", "full"),
        ("bf16_stochastic", "full"),
        ("bf16_kahan", "full"),
        ("fp32_master", "lora"),
        ("fp32_master", "qlora"),
    ],
)
def test_a_step_never_makes_the_host_wait(backend: Backend, update: str, method: str) -> None:
    params = "fp32" if update == "fp32" else "bf16"
    shape = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}  # whole blocks of NF4
    resolved = layout("gqa2", tp=1, micro=2, params=params, update=update, config=shape)
    weights = weights_of(resolved)
    if method != "full":
        resolved = changed(resolved, finetune={"method": method, "r": 4})
        weights = {**weights, **adapters_of(resolved, weights)}
    state = start(backend, resolved, weights)
    (batch,) = (local_batch(state, batch, micro_batch=2) for batch in batches(resolved, 1))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(3):
            result = train_step(state, batch, LR * step)
            backend.step_boundary()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert math.isfinite(backend.fetch({"loss": result.loss})["loss"])


def test_a_run_goes_on_from_its_checkpoint_bit_for_bit(backend: Backend, tmp_path: Path) -> None:
    data = {"source": "tokens", "path": str(token_file(tmp_path / "rows.npy", num_rows=18))}
    optim, bf16 = {"decay_steps": 4}, {"params": "bf16", "update": "fp32_master"}

    def run(name: str, steps: int) -> Path:
        resolved = run_plan(tmp_path / name, data, steps=steps, optim=optim, precision=bf16, checkpoint={"every": 2})
        train_rank(backend, resolved)
        return resolved.config.run.dir

    straight = run("straight", 4)
    run("broken", 2)
    assert course(run("broken", 4)) == course(straight)
    assert backend.diagnostics.peak_memory_bytes() > 0


def test_a_deterministic_run_of_long_rows_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Sixteen blocks of keys add to each gradient of a query, so that an order of sums exists."""
    assert_goes_on(tmp_path, "backend.name=cuda", "backend.deterministic=true")


def assert_goes_on(folder: Path, *overrides: str) -> None:
    """A run that ends after two steps and goes on has the records and weights of one that does not end.

    The runs are processes of their own, in which cuBLAS reads the variable of its workspace first.
    """
    seq_len, file = 2048, folder / "rows.npy"
    np.save(file, np.random.default_rng(0).integers(0, BASE["vocab_size"], (8, seq_len + 1), dtype=np.uint16))
    config = write_toml(
        folder,
        train={"steps": 4, "seq_len": seq_len},
        model={"preset": "tiny", "config": {"max_position_embeddings": seq_len}},
        data={"source": "tokens", "path": str(file)},
        precision={"params": "bf16", "update": "fp32_master"},
        optim={"decay_steps": 4},
        checkpoint={"every": 2},
    )

    def run(name: str, steps: int) -> Path:
        options = (f"run.dir={folder / name}", f"train.steps={steps}", *overrides)
        subprocess.run([sys.executable, "-m", "nxtrain", "train", str(config), *options], check=True)
        return folder / name

    straight = run("straight", 4)
    run("broken", 2)
    assert course(run("broken", 4)) == course(straight)
    saved = [tensors(directory.step_path(folder / name / CHECKPOINTS_DIR, 4)) for name in ("straight", "broken")]
    assert saved[0] == saved[1]


@pytest.mark.parametrize(("tp", "dp", "sp"), [(2, 1, False), (2, 1, True), (1, 2, False)])
def test_twenty_float32_steps_on_two_gpus_equal_transformers(two_gpus: RankPool, tp: int, dp: int, sp: bool) -> None:
    resolved = layout("gqa2", tp=tp, dp=dp, sp=sp, micro=4 // dp)
    check_course(two_gpus.run(2, run_ours, resolved, STEPS, weights_of(resolved)), expected("gqa2"), resolved)


@pytest.mark.parametrize("virtual_pp", [1, 2])
def test_twenty_float32_steps_through_two_stages_equal_transformers(two_gpus: RankPool, virtual_pp: int) -> None:
    layers = {"num_hidden_layers": 5}
    resolved = layout("gqa2", tp=1, pp=2, virtual_pp=virtual_pp, micro=1, config=layers)
    want = reference(layout("gqa2", tp=1, config=layers), STEPS)
    check_course(two_gpus.run(2, run_ours, resolved, STEPS, weights_of(resolved)), want, resolved)


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    count = torch.cuda.device_count()
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, str(count))
    monkeypatch.setenv("WORLD_SIZE", str(count + 1))
    with pytest.raises(BackendError, match=rf"local rank {count} has no GPU"):
        open_backend("cuda")


@pytest.mark.alone
def test_events_divide_the_step_and_cost_less_than_one_percent(backend: Backend, tmp_path: Path) -> None:
    """The steps take 20 ms or more, next to which ten events are little."""
    seq_len, file = 1024, tmp_path / "rows.npy"
    np.save(file, np.random.default_rng(0).integers(0, BASE["vocab_size"], (18, seq_len + 1), dtype=np.uint16))
    data = {"source": "tokens", "path": str(file)}
    shape = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8}
    model = {"config": {**shape, "max_position_embeddings": seq_len}}
    step_s: dict[str, list[float]] = {"on": [], "off": []}
    for attempt in range(4):
        for name, times in step_s.items():
            metrics = {"log_every": 50, "tensorboard": False, "progress": False, "step_sections": name}
            resolved = run_plan(
                tmp_path / f"{name}{attempt}",
                data,
                steps=100,
                train={"seq_len": seq_len},
                model=model,
                metrics=metrics,
                checkpoint={"every": 0},
            )
            train_rank(backend, resolved)
            *_, last = records(resolved.config.run.dir)
            times.append(last["step_time_s"])
            if name == "on":
                assert sum(last[key] for key in KINDS_S) == pytest.approx(50 * last["step_time_s"], rel=0.02)
                assert all(last[key] > 0 for key in SECTIONS_S)
    assert min(step_s["off"]) > 0.02, "a larger model is needed"
    assert min(step_s["on"]) < 1.01 * min(step_s["off"])
