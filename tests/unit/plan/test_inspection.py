"""Facts of `nxtrain inspect` against models that are built: names, shapes, entries, bytes, units; run folders."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from typer.testing import CliRunner

from nxtrain.backends.cpu import CpuBackend
from nxtrain.checkpoint.directory import MANIFEST, META
from nxtrain.checkpoint.meta import Meta
from nxtrain.checkpoint.save import degrees_of
from nxtrain.cli.main import app
from nxtrain.common.errors import ConfigError
from nxtrain.common.machines import MACHINES
from nxtrain.common.mesh import Axis, Mesh
from nxtrain.common.sharding import ParamTable
from nxtrain.config.check import Resolved
from nxtrain.config.finetune_schema import FinetuneConfig
from nxtrain.config.schema import OptimConfig
from nxtrain.plan import memory
from nxtrain.plan.adapters import Method
from nxtrain.plan.inspection import CheckpointFacts
from nxtrain.plan.job import Job
from nxtrain.plan.moments import accumulated_bytes
from nxtrain.plan.tensors import Rank, global_tensors
from nxtrain.tools.trace.fake_rank import FakeBackend
from nxtrain.train.build import build_meta, build_model, build_state
from tests.support.drawn import FAMILIES
from tests.support.models import changed, hf_model
from tests.unit.plan import test_memory
from tests.unit.tools.trace import test_fake_rank as test_trace

DRAWN = 40
ALONE = Axis("shard", 0, ((0,),))
SHARDED = [seed for seed in range(33) if test_trace.draw(seed, adapted=seed % 3 == 0)[1].is_fully_sharded]
"""Draws whose parameters are sharded over data parallel ranks."""
METHODS: tuple[Method, ...] = ("full", "full", "lora", "qlora")
TARGETS: tuple[tuple[str, ...], ...] = ((), ("q_proj", "v_proj"), ("o_proj", "up_proj"), ("down_proj",))
GOLDEN = Path(__file__).parents[2] / "golden" / "inspect_405b.txt"
BIG = (
    "configs/llama2_70b_trn1.toml",
    "model.preset=llama3.1-405b",
    "parallel.tp=8",
    "parallel.pp=16",
    "parallel.dp=8",
)
MOST_RSS_MIB = 200
"""Of a Python with typer, pydantic, numpy and rich; the parameters of a 405B take 750 GiB."""


def answer(*argv: str) -> Any:
    result = CliRunner().invoke(app, ["inspect", *argv, "--json"])
    if result.exception is not None:
        raise result.exception
    return json.loads(result.output)


def draw(seed: int) -> tuple[Resolved, Job, int]:
    """A family and a layout, its job, and any of its ranks."""
    resolved, mesh = test_memory.draw(seed)
    rng = Random(seed)
    method = rng.choice(METHODS)
    finetune = FinetuneConfig(method=method, r=rng.choice([2, 8]), targets=rng.choice(TARGETS))
    optim = resolved.config.optim
    if finetune.adapts:  # Muon updates no adapters
        optim = OptimConfig()
    config = resolved.config.model_copy(update={"finetune": finetune, "optim": optim})
    if method == "qlora":  # tensor parallelism cuts no block of 64 weights
        sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 4}
        model = resolved.model.model_copy(update={**sizes, "head_dim": 64})
        resolved = Resolved(config, resolved.family, model)
    else:
        resolved = Resolved(config, resolved.family, resolved.model)
    config = resolved.config.model_copy(
        update={"parallel": resolved.config.parallel.model_copy(update={"dp": mesh.dp_size})}
    )
    job = Job(resolved.dimensions, MACHINES["p5.48xlarge"], 1, config)
    return resolved, job, rng.randrange(mesh.world)


@pytest.mark.parametrize("seed", range(DRAWN))
def test_every_parameter_of_any_rank_is_that_of_the_model_that_is_built(seed: int) -> None:
    resolved, job, number = draw(seed)
    rank = Rank.of(job, number)
    backend = CpuBackend()
    backend.collectives = test_memory.Alone()  # type: ignore[assignment]
    model = build_meta(resolved, backend, rank.mesh)
    table = ParamTable.of(model)
    result = list(rank.tensors())
    built = [(name, tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()]
    assert [(item.parameter.name, item.local_shape, item.parameter.is_trained) for item in result] == built
    for item in result:
        spec = table[item.parameter.name]
        assert item.parameter.spec.shape == spec.shape
        name = item.parameter.name
        assert global_tensors(item) == {spec.global_name(name, s): spec.global_shape(s) for s in spec.segments}
        assert item.boxes == tuple(spec.blocks(rank.mesh.tp, ALONE))
    sizes = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
    assert {item.parameter.name: item.num_bytes for item in result} == sizes


@pytest.mark.parametrize("seed", range(DRAWN))
def test_bytes_of_the_first_ranks_are_those_of_the_plan(seed: int) -> None:
    resolved, job, _ = draw(seed)
    for stage in range(job.config.parallel.pp):
        result = Rank.first_of(job, stage).bytes
        planned = (memory.params_bytes(job, stage), accumulated_bytes(job, stage), memory.optimizer_bytes(job, stage))
        assert (result.params, result.grads, result.optimizer) == planned
        frozen = job.frozen(stage).held if job.adapters else 0
        exact = resolved.config.finetune.method != "qlora"  # whose groups of scales a plan counts as a fraction
        assert result.frozen == frozen if exact else result.frozen == pytest.approx(frozen, rel=0.02)


@pytest.mark.parametrize("seed", range(16))
def test_state_of_any_rank_is_that_of_a_rank_that_is_built(seed: int) -> None:
    resolved, mesh = test_memory.draw(seed)
    job = test_memory.job_of(resolved, mesh)
    number = Random(seed).randrange(job.world)
    rank = Rank.of(job, number)
    state = test_memory.state_of(resolved, rank.mesh)
    own = state.data_parallel.shards.values() if resolved.config.parallel.shard == "zero1" else ()
    kept = [x for kind in state.optimizer.state.values() for x in kind.values()]
    assert rank.bytes.params == test_memory.num_bytes(state.model.parameters())
    assert rank.bytes.optimizer == test_memory.num_bytes([*kept, *own])
    shapes = {tensor.parameter.name: tensor.state_shape for tensor in rank.tensors()}
    assert shapes == {name: tuple(shard.shape) for name, shard in state.data_parallel.shards.items()}


@pytest.mark.parametrize("seed", SHARDED)
def test_units_and_shards_are_those_of_fully_shard(seed: int) -> None:
    resolved, job, _, attention = test_trace.draw(seed, adapted=seed % 3 == 0)
    rng = Random(seed)
    resolved = changed(resolved, parallel={"unit_params": rng.choice([0, 0, 100_000, 1_000_000])})
    job = Job(job.dimensions, job.machine, job.nodes, resolved.config)
    rank = Rank.of(job, rng.randrange(job.world))
    backend = FakeBackend(job.world, rank.mesh.rank, test_trace.RANKS_PER_NODE, attention)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            backend.lay_out(rank.mesh)
            model = build_model(resolved, backend, rank.mesh, init="zeros")
            build_state(resolved, model, backend, rank.mesh)
        assert _shards(model) == {tensor.parameter.name: (tensor.shape, tensor.num_bytes) for tensor in rank.tensors()}
        names = [tensor.parameter.name for tensor in rank.tensors()]
        assert _units(model) == Counter(frozenset(_of_modules(names, unit.modules)) for unit in rank.units)
    finally:
        backend.close()


def _of_modules(names: list[str], modules: tuple[str, ...]) -> list[str]:
    return [name for name in names if name.startswith(tuple(f"{module}." for module in modules))]


def _shards(model: nn.Module) -> dict[str, tuple[tuple[int, ...], int]]:
    locals_ = {name: p.to_local() for name, p in model.named_parameters() if isinstance(p, DTensor)}
    return {name: (tuple(x.shape), x.numel() * x.element_size()) for name, x in locals_.items()}


def _units(model: nn.Module) -> Counter[frozenset[str]]:
    """Names of the parameters of each group that torch gathers at once."""
    names = {id(p): name for name, p in model.named_parameters()}
    units = Counter[frozenset[str]]()
    seen = set[int]()
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        group = module._get_fsdp_state()._fsdp_param_group
        if group is not None and id(group) not in seen:
            seen.add(id(group))
            units[frozenset(names[id(param.sharded_param)] for param in group.fsdp_params)] += 1
    return units


@pytest.mark.parametrize("seed", range(8))
def test_entries_of_all_ranks_are_the_parameters_of_transformers(seed: int) -> None:
    resolved, job, _ = draw(seed)
    resolved = changed(resolved, finetune={"method": "full"})
    job = Job(resolved.dimensions, job.machine, 1, changed_job(job, method="full"))
    whole = dict(hf_model(resolved).named_parameters())
    covered = {name: np.zeros(tuple(p.shape), dtype=bool) for name, p in whole.items()}
    for number in range(job.world):
        for tensor in Rank.of(job, number).tensors():
            for box in tensor.boxes:
                name = tensor.parameter.spec.global_name(tensor.parameter.name, box.segment)
                covered[name][tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))] = True
    assert all(seen.all() for seen in covered.values())
    total = sum(p.numel() for p in whole.values())
    assert sum(seen.size for seen in covered.values()) == total


def changed_job(job: Job, *, method: str) -> Any:
    return job.config.model_copy(update={"finetune": job.config.finetune.model_copy(update={"method": method})})


def test_a_405b_needs_neither_torch_nor_memory() -> None:
    code = (
        "import re, sys\nfrom nxtrain.__main__ import main\n"
        f"sys.argv[1:] = {['inspect', *BIG, '--json']!r}\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n"
        "    assert 'torch' not in sys.modules and not end.code\n"
        "    print(re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1], file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    result = json.loads(done.stdout)
    assert int(done.stderr) >> 10 < MOST_RSS_MIB
    assert result["model"]["params"]["total"] == 405_853_388_800
    assert (result["layout"]["world"], len(result["stages"]), len(result["tensors"])) == (1024, 16, 126 * 6 + 3)
    params = sum(math.prod(tensor["shape"]) for tensor in result["tensors"])
    assert params == 405_853_388_800


def test_the_text_of_a_405b() -> None:
    result = CliRunner().invoke(app, ["inspect", *BIG, "--tree"])
    assert [line.rstrip() for line in result.output.splitlines()] == GOLDEN.read_text(encoding="utf-8").splitlines()


def test_one_rank_has_its_own_stage_and_entries() -> None:
    result = answer(*BIG, "--rank", "1023")
    assert (result["rank"], [stage["stage"] for stage in result["stages"]]) == (1023, [15])
    head = result["tensors"][-1]
    assert (head["name"], head["local_shape"], head["cut"]) == ("lm_head.weight", [16_032, 16_384], {"tp": 0})
    assert head["entries"] == [{"name": "lm_head.weight", "offsets": [7 * 16_032, 0], "sizes": [16_032, 16_384]}]
    assert head["state_shape"] == [16_032 // 8, 16_384]


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank 1024 does not exist: the run has 1,024 ranks") as caught:
        answer(*BIG, "--rank", "1024")
    assert "use 0 to 1023" in str(caught.value)


def _run_folder(folder: Path) -> Path:
    """A run folder with two checkpoints, as a run of four ranks leaves it."""
    folder.mkdir()
    (folder / "config.toml").write_text('[model]\npreset = "tiny"\n[parallel]\ntp = 2\n', encoding="utf-8")
    (folder / "environment.json").write_text(json.dumps({"ranks": 4, "ranks per node": 2, "tp": 2, "pp": 1, "dp": 2}))
    for step in (10, 20):
        path = folder / "checkpoints" / f"step-{step:08d}"
        path.mkdir(parents=True)
        meta = Meta(
            step=step,
            samples=0,
            tokens=0,
            seed=0,
            family="llama",
            config={},
            dtype="float32",
            mesh={"pp": 1, "dp": 2, "tp": 2},
        )
        (path / META).write_text(meta.sealed(), encoding="utf-8")
        (path / MANIFEST).write_bytes(b"x" * 100)
        (path / "rank-00000.safetensors").write_bytes(b"x" * 1000 * step)
    return folder


def test_a_run_folder_shows_its_degrees_and_its_newest_checkpoint(tmp_path: Path) -> None:
    run = _run_folder(tmp_path / "run")
    result = answer(str(run))
    assert (result["layout"]["world"], result["layout"]["dp"]) == (4, 2)
    held = result["checkpoint"]
    meta_bytes = (run / "checkpoints" / "step-00000020" / META).stat().st_size
    assert (held["step"], held["world"], held["bytes"]) == (20, 4, 20_000 + 100 + meta_bytes)
    text = CliRunner().invoke(app, ["inspect", str(run)]).output
    assert "newest checkpoint: step 20" in text
    other = answer(str(run), "parallel.tp=1")
    assert (other["layout"]["world"], other["checkpoint"]["world"]) == (1, 4)


def test_ranks_of_context_parallelism_count_as_writers_of_a_checkpoint() -> None:
    degrees = degrees_of(Mesh.build(16, 5, tp=2, cp=4, pp=1, dp=2))
    assert CheckpointFacts(Path(), 1, 0, degrees).world == 16
    assert degrees_of(Mesh.build(4, 0, tp=2, dp=2)) == {"pp": 1, "dp": 2, "tp": 2}, "as in earlier checkpoints"


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.toml"):
        answer(str(tmp_path))


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_of_every_family_are_listed_once(family: str) -> None:
    output = CliRunner().invoke(app, ["inspect", "configs/tiny_cpu.toml", f"model.family={family}", "--tree"]).output
    assert output.count("input_layernorm") == 1
    assert output.count("mlp.down_proj") == 1
