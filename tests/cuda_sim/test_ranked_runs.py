"""Whole runs of several ranks on pretended GPUs: steps, evaluation, checkpoints, and a start under another layout.

Each rank is a process. Hosts agree over gloo and a store, and NCCL's calls are recorded. No kernel computes. So the
numbers that hosts read are replaced by ones, and replicas count as equal. AdamW leaves weights in float32 as drawn, to
the bit.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from nxtrain.backends import open_backend
from nxtrain.backends.cuda import CudaBackend
from nxtrain.checkpoint import directory
from nxtrain.checkpoint.load import open_checkpoint
from nxtrain.checkpoint.shards import MODEL
from nxtrain.common.distributed.c10d_collectives import C10dCollectives
from nxtrain.common.errors import ConfigError
from nxtrain.common.io import object_store
from nxtrain.common.io.checksummed_file import verify
from nxtrain.common.mesh import Mesh
from nxtrain.common.run_folder import CHECKPOINTS_DIR
from nxtrain.common.sharding import Layout, ParamTable
from nxtrain.config.check import Resolved, resolve_config
from nxtrain.config.load import load
from nxtrain.config.tables import toml_value
from nxtrain.launch.gpu import QUIET_TRANSFERS, RECORDING
from nxtrain.train import command, trainer
from nxtrain.train.build import build_model, mesh_of
from nxtrain.train.health.numerics import NumericsGuard
from tests.cuda_sim.test_communicators import mismatches, stuck
from tests.cuda_sim.test_runs import assert_few_waits, recorded_run
from tests.support import TINY
from tests.support.cuda_sim import WITHOUT_TRIAL, Record, SimulatedGpu, play_together
from tests.support.drawn import SEED, TRIES
from tests.support.layouts import ONE, Degrees, all_layouts, context_layouts, expert_layouts
from tests.support.models import weights_of
from tests.support.ranks import open_store
from tests.support.runs import records

SAVED, STEPS = 2, 4
"""Last steps of the first start and of the second."""

HEADS = 12
SHAPE: dict[str, Any] = {
    "hidden_size": 16 * HEADS,
    "intermediate_size": 96,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "vocab_size": 480,
    "max_position_embeddings": 512,
}
POOLS: dict[str, list[Degrees]] = {
    "none": [degrees for degrees in all_layouts() if degrees.shard == "none"],
    "zero1": [degrees for degrees in all_layouts() if degrees.shard == "zero1" and degrees.dp > 1],
    "full": [degrees for degrees in all_layouts() if degrees.shard in ("grad_op", "full") and degrees.dp > 1],
    "hybrid": [degrees for degrees in all_layouts() if degrees.shard == "hybrid" and degrees.dp > 1],
    "cp": [*context_layouts()],
    "ep": [*expert_layouts()],
}
PAIRS = [("none", "full"), ("zero1", "cp"), ("full", "zero1"), ("cp", "hybrid"), ("ep", "ep"), ("hybrid", "none")]
"""Kinds of the layouts that save and that resume, in turn."""


@dataclass(frozen=True)
class Drawn:
    """A run under two layouts: overrides of `TINY` that they share, and those of each."""

    index: int
    saved: Degrees
    resumed: Degrees
    shared: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.index}-{self.saved}-to-{self.resumed}"

    def start(self, folder: Path, degrees: Degrees, steps: int) -> list[str]:
        """Overrides of one start in a folder."""
        own = {f"parallel.{name}": value for name, value in asdict(degrees).items()}
        there = {"run.dir": str(folder / "run"), "data.path": str(folder / "texts"), "train.steps": steps}
        return [f"{name}={toml_value(value)}" for name, value in {**self.shared, **own, **there}.items()]

    def resolved(self, folder: Path, degrees: Degrees) -> Resolved:
        """The configuration of a layout, held to every rule."""
        return resolve_config(load(TINY, self.start(folder, degrees, STEPS)), degrees.world, "cuda")


def draw(seed: int, index: int, *, most: int) -> Drawn:
    """One run under two layouts of two to `most` ranks."""
    kinds = PAIRS[index % len(PAIRS)]
    for attempt in range(TRIES):
        rng = Random(f"ranked/{seed}/{index}/{attempt}")
        saved, resumed = (rng.choice([one for one in POOLS[kind] if 2 <= one.world <= most]) for kind in kinds)
        drawn = Drawn(index, saved, resumed, _shared(rng, saved, resumed))
        try:
            for degrees in (saved, resumed):
                drawn.resolved(Path("folder"), degrees)
        except ConfigError:
            continue
        return drawn
    raise AssertionError(f"none of {TRIES} draws of {kinds} fits")


def _shared(rng: Random, *layouts: Degrees) -> dict[str, Any]:
    shape = {**SHAPE, "num_hidden_layers": max(2, *(degrees.pp * degrees.virtual_pp for degrees in layouts))}
    model: dict[str, Any] = {}
    if max(degrees.ep for degrees in layouts) > 1:
        model = {"family": "mixtral", "moe_dispatch": "capacity"}
        shape["num_local_experts"] = math.lcm(*(degrees.ep for degrees in layouts))
    rules = [("fp32", "fp32"), ("bf16", "fp32_master"), ("bf16", "bf16_stochastic"), ("bf16", "bf16_kahan")]
    params, rule = rng.choice([rules[0], rng.choice(rules[1:])])
    has_documents = rng.random() < 0.7 and params == "bf16"  # in fp32 a kernel is compiled for them, in a minute
    tables: dict[str, dict[str, Any]] = {
        "model": {**model, **{f"config.{name}": value for name, value in shape.items()}},
        "train": {
            "seq_len": rng.choice((48, 96, 192)),
            "global_batch": math.lcm(*(degrees.dp * degrees.pp for degrees in layouts)),
            "micro_batch": 1,
            "eval_every": SAVED,
            "eval_batches": 1,
            "remat": rng.choice(("none", "selective", "full")),
        },
        "precision": {"params": params, "update": rule},
        "optim": {"name": rng.choice(("adamw", "adamw", "muon")), "decay_steps": 10, "clip": rng.choice((0.0, 1.0))},
        "data": {"source": "text", "validation_fraction": 0.3, "doc_mask": has_documents},
        "checkpoint": {"every": SAVED, "async": rng.random() < 0.5},
        "parallel": {"offload": ["activations"] if rng.random() < 0.2 else []},
        "metrics": {"log_every": rng.choice((1, SAVED)), "tensorboard": False, "progress": False},
        "recovery": {"vote_every": rng.choice((1, 50))},
        "backend": {"name": "cuda"},
    }
    return {f"{table}.{name}": value for table, values in tables.items() for name, value in values.items()}


def write_texts(folder: Path) -> None:
    """Write texts of words that repeat little, so that few tokens do not make many rows."""
    (folder / "texts").mkdir()
    rng = Random(0)
    for number in range(40):
        words = [str(rng.randrange(10**6)) for _ in range(600)]
        (folder / "texts" / f"{number}.txt").write_text(" ".join(words), encoding="utf-8")


Result = tuple[Record, list[str]]
Mutant = Callable[[int], Any]
"""Context of a rank in which its product is broken."""


def ranked(overrides: Sequence[str], world: int, mutant: Mutant = nullcontext) -> Result:
    """Record of a rank of a run, and the files of the checkpoint that the rank opens to resume."""
    loaded = load(TINY, overrides)
    plan = resolve_config(loaded, world, "cuda")
    opened: list[str] = []
    of_nccl = C10dCollectives.barrier

    def barrier(self: C10dCollectives) -> None:
        of_nccl(self)
        dist.all_gather_object([None] * world, None)  # NCCL's, which is pretended, lets nobody wait

    def open_source(path: Path) -> Any:
        opened.append(path.name)
        return object_store.open_source(path)

    os.environ.update({variable.name: variable.value for variable in (QUIET_TRANSFERS, RECORDING)})
    with (
        patch.object(C10dCollectives, "barrier", barrier),
        patch("nxtrain.checkpoint.shard_files.open_source", open_source),
        WITHOUT_TRIAL,
        recorded_run() as record,
        mutant(int(os.environ["RANK"])),
    ):
        command.train(loaded, plan)
    return record, opened


def started(gpu: SimulatedGpu, overrides: Sequence[str], world: int, *mutant: Mutant) -> list[Result]:
    """The ranks of one start, from the opening of their devices to the end."""
    store = open_store()
    return gpu.run(play_together, world, store.port, ranked, overrides, world, *mutant)


def assert_sound(results: Sequence[Result]) -> None:
    """Ranks make equal calls, none waits for ever, and hosts wait only where they read or save."""
    of_ranks = [record for record, _ in results]
    assert mismatches(of_ranks) == []
    assert stuck(of_ranks) == {}
    for record in of_ranks:
        assert_few_waits(record)
        steps = [event.fields["name"] for event in record.of("point")].count("step")
        assert steps == SAVED


def tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    """Whole tensors of a checkpoint, in which ranks' files have each entry exactly once, by key."""
    _, manifest = open_checkpoint(checkpoint)
    assert {path.name for path in checkpoint.glob("*.safetensors")} == set(manifest.files)
    parts: dict[str, list[tuple[list[int], Tensor]]] = defaultdict(list)
    for name, stored in manifest.files.items():
        verify(checkpoint / name, stored)
        with safe_open(checkpoint / name, framework="pt") as file:
            offsets = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            for key, of_part in offsets.items():
                parts[key].append((of_part["saved_offsets"], file.get_tensor(key)))
            assert set(offsets) == set(file.keys())
    assert set(parts) == set(manifest.tensors)
    tensors = {}
    for key, entry in manifest.tensors.items():
        times = torch.zeros(entry.shape, dtype=torch.int64)
        tensors[key] = torch.zeros(entry.shape, dtype=parts[key][0][1].dtype)
        for begin, part in parts[key]:
            box = tuple(slice(first, first + size) for first, size in zip(begin, part.shape, strict=True))
            times[box] += 1
            tensors[key][box] = part
        assert times.eq(1).all(), key
    return tensors


def drawn_weights(drawn: Drawn, folder: Path) -> dict[str, Tensor]:
    """First weights of the run, whole, as one rank on a CPU draws them, by their names in checkpoints."""
    lines = [*drawn.start(folder, ONE, STEPS), "backend.name=cpu", "parallel.offload=[]"]
    resolved = resolve_config(load(TINY, lines), 1, "cpu")
    backend = open_backend("cpu")
    mesh = mesh_of(resolved, backend)
    model = build_model(resolved, backend, mesh, init="draw")
    table, parameters = ParamTable.of(model), dict(model.named_parameters())
    weights = {}
    for name, blocks in Layout(table, mesh).items():
        for block in blocks:
            weights[table[name].global_name(name, block.segment)] = block.of(parameters[name].detach())
    return weights


def weights_in(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights among the tensors of a checkpoint, by name."""
    prefix = f"{MODEL}/"
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}


RUNS = [draw(SEED, index, most=4) for index in range(len(PAIRS))]
MORE = [draw(SEED, index, most=8) for index in range(len(PAIRS), 5 * len(PAIRS))]


@pytest.mark.parametrize("drawn", [*RUNS, *(pytest.param(run, marks=pytest.mark.slow) for run in MORE)], ids=str)
def test_a_run_saves_every_tensor_once_and_goes_on_under_another_layout(
    gpu: SimulatedGpu, tmp_path: Path, drawn: Drawn
) -> None:
    """Each rank opens a file at most once to resume, and all ranks together open every file."""
    write_texts(tmp_path)
    folder = tmp_path / "run" / CHECKPOINTS_DIR
    assert_sound(started(gpu, drawn.start(tmp_path, drawn.saved, SAVED), drawn.saved.world))
    saved = tensors_of(directory.step_path(folder, SAVED))
    of_transformers = weights_of(drawn.resolved(tmp_path, drawn.saved))
    assert {name: weight.shape for name, weight in weights_in(saved).items()} == {
        name: weight.shape for name, weight in of_transformers.items()
    }
    results = started(gpu, drawn.start(tmp_path, drawn.resumed, STEPS), drawn.resumed.world)
    assert_sound(results)
    opened = [files for _, files in results]
    assert all(len(files) == len(set(files)) for files in opened)
    assert set().union(*opened) == {path.name for path in directory.step_path(folder, SAVED).glob("*.safetensors")}
    every = drawn.shared["metrics.log_every"]
    steps = [step for step in range(1, STEPS + 1) if step == 1 or step % every == 0]
    losses = [None if step % SAVED else 1.0 for step in steps]
    assert [(line["step"], line.get("val_loss")) for line in records(tmp_path / "run")] == [
        *zip(steps, losses, strict=True)
    ]
    again = tensors_of(directory.step_path(folder, STEPS))
    assert {key: tensor.shape for key, tensor in again.items()} == {key: tensor.shape for key, tensor in saved.items()}
    if (drawn.shared["precision.params"], drawn.shared["optim.name"]) == ("fp32", "adamw"):
        first = drawn_weights(drawn, tmp_path)
        for weights in (weights_in(saved), weights_in(again)):
            assert [name for name in weights if not torch.equal(weights[name], first[name])] == []


def replicas(gpu: SimulatedGpu, folder: Path, mutant: Mutant) -> list[Record]:
    """Records of a broken run of two replicas."""
    write_texts(folder)
    degrees = Degrees(dp=2)
    run = Drawn(0, degrees, degrees, {**RUNS[0].shared, "train.global_batch": 4, "checkpoint.async": True})
    return [record for record, _ in started(gpu, run.start(folder, degrees, SAVED), degrees.world, mutant)]


def without_a_vote(rank: int) -> Any:
    """Rank 1 compares no replicas before it saves."""
    return patch.object(NumericsGuard, "vote", lambda *_: None) if rank == 1 else nullcontext()


def from_pageable_memory(rank: int) -> Any:
    """Rank 1 uploads one number more, from memory that is not pinned, with each part of a batch."""
    put = CudaBackend.put

    def put_more(self: CudaBackend, x: Tensor) -> Tensor:
        torch.zeros(1).to(self.device)
        return put(self, x)

    return patch.object(CudaBackend, "put", put_more) if rank == 1 else nullcontext()


def test_a_rank_that_skips_a_collective_of_a_save_is_seen(gpu: SimulatedGpu, tmp_path: Path) -> None:
    of_ranks = replicas(gpu, tmp_path, without_a_vote)
    assert "ranks 0 and 1" in mismatches(of_ranks)[0]
    assert stuck(of_ranks)


def test_a_pageable_copy_of_one_rank_is_seen(gpu: SimulatedGpu, tmp_path: Path) -> None:
    first, second = replicas(gpu, tmp_path, from_pageable_memory)
    assert_few_waits(first)
    with pytest.raises(AssertionError, match=r"assert .* == \[\]"):
        assert_few_waits(second)


def failing(rank: int) -> Any:
    """Rank 1 fails in its first step."""

    def fail(*_: Any) -> Any:
        raise ValueError("a broken device")

    return patch.object(trainer, "train_step", fail) if rank == 1 else nullcontext()


def test_a_rank_that_loses_another_names_its_failure(gpu: SimulatedGpu, tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as failure:
        replicas(gpu, tmp_path, failing)
    assert "LostPeerError: rank 1 failed: ValueError: a broken device" in str(failure.value)


def transfers(quiet: bool) -> str:
    """Lines that a rank of a pipeline prints in its first transfers."""
    os.environ[QUIET_TRANSFERS.name] = QUIET_TRANSFERS.value if quiet else "true"
    with tempfile.TemporaryFile("w+") as printed:
        os.dup2(printed.fileno(), 2)
        backend = open_backend("cuda")
        mesh = Mesh.build(2, backend.rank, pp=2)
        backend.lay_out(mesh)
        x = torch.zeros(8, device=backend.device)
        if backend.rank == 0:
            backend.collectives.start_send(x, mesh.pp, 1).wait()
        else:
            backend.collectives.start_receive(x, mesh.pp, 0).wait()
        backend.close()
        printed.seek(0)
        return printed.read()


@pytest.mark.parametrize("quiet", [True, False])
def test_the_variables_of_a_launch_silence_the_warning_of_transfers(gpu: SimulatedGpu, quiet: bool) -> None:
    store = open_store()
    printed = gpu.run(play_together, 2, store.port, transfers, quiet)
    warns = not hasattr(dist, "ProcessGroupNCCL2")  # torch 2.15, whose groups have no such warning
    assert [("unbatched P2P" in lines) for lines in printed] == [warns and not quiet] * 2
