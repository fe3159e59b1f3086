"""The published recipes say what was published: a value of theirs cannot change unseen."""

from __future__ import annotations

import math
import re
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nxtrain.cli.main import main
from nxtrain.common.mesh import Mesh
from nxtrain.common.sharding import ParamTable
from nxtrain.common.vocab import ID_MASK
from nxtrain.config.check import Resolved, resolve_config
from nxtrain.config.load import Loaded, load, values
from nxtrain.config.muon import MuonConfig
from nxtrain.data.arrow.prepared import PreparedCorpus
from nxtrain.data.arrow.streams import Documents, open_lane
from nxtrain.data.stream_loader import LaneOrder
from nxtrain.data.tokenization import load_tokenizer
from nxtrain.nn.init import draw
from nxtrain.optim.schedule import Schedule
from tests.support.corpora import rows_of_stream, write_corpus, write_tokenizer
from tests.support.parity import table_of
from tests.support.published import CONFIGS, world_of

BOTH: dict[str, Any] = {
    "run.seed": 12349,
    "cluster.instance": "trn1.32xlarge",
    "model.family": "llama",
    "model.init": "scaled",
    "model.fused_qkv": True,
    "model.fused_gate_up": True,
    "parallel.virtual_pp": 1,
    "parallel.sequence_parallel": True,
    "train.steps": 500_000,
    "train.seq_len": 4096,
    "train.global_batch": 1024,
    "train.micro_batch": 1,
    "train.remat": "selective",
    "precision.params": "bf16",
    "optim.schedule": "cosine",
    "optim.warmup_steps": 2000,
    "optim.betas": (0.9, 0.95),
    "optim.weight_decay": 0.1,
    "optim.decay_norms": True,
    "optim.clip": 1.0,
    "data.source": "arrow",
    "data.validation_path": "",
    "data.validation_fraction": 0.0,
    "train.eval_every": 0,
    "data.packing": "concat",
    "data.doc_mask": False,
    "checkpoint.resume": "auto",
    "backend.name": "neuron",
    "backend.layers": "nxd",
    "recovery.hang_timeout_s": 4000.0,
    "recovery.max_restarts": 100,
    "recovery.vote_every": 100,
}
RECIPES: dict[str, dict[str, Any]] = {
    "llama2_7b_trn1": {
        **BOTH,
        "cluster.nodes": 128,
        "model.preset": "llama2-7b",
        "model.config.initializer_range": 0.021,
        "parallel.tp": 8,
        "parallel.pp": 1,
        "parallel.dp": 512,
        "parallel.shard": "none",
        "parallel.bucket_mib": 512,
        "precision.update": "bf16_stochastic",
        "precision.accumulate": "bf16",
        "precision.reduce": "bf16",
        "precision.state": "bf16",
        "optim.lr": 3e-4,
        "optim.min_lr": 3e-5,
        "optim.decay_steps": 480_000,
        "optim.eps": 1e-5,
        "checkpoint.every": 1000,
        "checkpoint.keep": 5,
        "checkpoint.async": False,
    },
    "llama2_70b_trn1": {
        **BOTH,
        "backend.in_flight": 31,
        "cluster.nodes": 256,
        "model.preset": "llama2-70b",
        "model.config.initializer_range": 0.02,
        "parallel.tp": 32,
        "parallel.pp": 8,
        "parallel.dp": 32,
        "parallel.shard": "zero1",
        "precision.update": "fp32_master",
        "precision.accumulate": "fp32",
        "precision.reduce": "fp32",
        "precision.state": "fp32",
        "optim.lr": 1.5e-4,
        "optim.min_lr": 1.5e-5,
        "optim.decay_steps": 500_000,
        "optim.eps": 1e-8,
        "checkpoint.every": 300,
        "checkpoint.keep": 3,
        "checkpoint.async": True,
    },
}


def recipe(name: str) -> Loaded:
    return load(CONFIGS / f"{name}.toml")


def plan(name: str) -> Resolved:
    """A recipe as the commands of a user get it, on its own cluster."""
    loaded = recipe(name)
    return resolve_config(loaded, world_of(loaded))


@pytest.mark.parametrize("name", RECIPES)
def test_the_values_are_the_published_ones(name: str) -> None:
    result = values(recipe(name).config)
    assert {key: result.get(key) for key in RECIPES[name]} == RECIPES[name]


@pytest.mark.parametrize("name", RECIPES)
def test_a_changed_default_cannot_change_a_recipe(name: str) -> None:
    loaded = recipe(name)
    whole = ("precision.", "optim.", "checkpoint.")
    keys = [key for key in values(loaded.config) if key in RECIPES[name] or key.startswith(whole)]
    idle = {"precision.type", "precision.loss_scale", "precision.loss_scale_every"}  # each key is set; none has fp16
    idle.add("precision.fp8")
    idle |= {f"optim.{key}" for key in MuonConfig.model_fields}  # the optimizer is AdamW
    of_others = ("warmup_ratio", "decay_ratio", "decay_shape", "pieces", "rewarm_steps")
    idle |= {f"optim.{key}" for key in of_others}  # a cosine has its lengths in steps
    of_rule = ("weight_decay_schedule", "weight_decay_pieces", "beta1_pieces", "beta2_pieces")
    idle |= {f"optim.{key}" for key in of_rule}  # the numbers of the update stay
    idle.add("optim.ema_decay")  # no mean of the weights is kept
    assert {key for key in keys if loaded.origins[key] == "default"} == idle


@pytest.mark.parametrize("name", RECIPES)
def test_every_value_names_its_source(name: str) -> None:
    lines = (CONFIGS / f"{name}.toml").read_text(encoding="utf-8").splitlines()
    settings = [line.partition("  # ") for line in lines if " = " in line and not line.startswith("#")]
    unsourced = [value.strip() for value, _, why in settings if not re.search(r"\b(blog|HLAT|paper|nxtrain)\b", why)]
    assert unsourced == [f'name = "{name}"']


@pytest.mark.parametrize(("name", "accumulation"), [("llama2_7b_trn1", 2), ("llama2_70b_trn1", 32)])
def test_the_degrees_fill_the_cluster_and_share_the_batch(name: str, accumulation: int) -> None:
    loaded = recipe(name)
    config = loaded.config
    mesh = Mesh.build(world_of(loaded), 0, tp=config.parallel.tp, pp=config.parallel.pp)
    assert mesh.dp_size == config.parallel.dp
    assert config.train.global_batch == accumulation * config.train.micro_batch * mesh.dp_size
    assert config.train.global_batch * config.train.seq_len == 4_194_304


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("llama2_7b_trn1", {1: 1.5e-7, 1000: 1.5e-4, 2000: 3e-4, 480_000: 3e-5, 500_000: 3e-5}),
        # 7.5e-8 and 9e-7 stand in the log of HLAT's 70b/README.md.
        ("llama2_70b_trn1", {1: 7.5e-8, 12: 9e-7, 2000: 1.5e-4, 500_000: 1.5e-5}),
    ],
)
def test_the_learning_rates_are_the_published_ones(name: str, rates: dict[int, float]) -> None:
    schedule = Schedule.of(plan(name).config)
    assert {step: schedule.at(step) for step in rates} == pytest.approx(rates, rel=1e-12)


@pytest.mark.parametrize("name", RECIPES)
def test_the_command_of_a_recipe_makes_the_corpus_that_it_reads(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line of its comment, executed; rows of the recipe's length are then documents end to end."""
    config = recipe(name).config
    text = (CONFIGS / f"{name}.toml").read_text(encoding="utf-8")
    (line,) = re.findall(r"^#     (nxtrain .+)$", text.partition("[data]")[2], re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "data", "text", [f"{number} " * 3000 for number in range(9)])
    monkeypatch.setattr("sys.argv", line.split())
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "tokenizer"), 300)
    documents = Documents(PreparedCorpus(Path(config.data.path)), tokenizer, 300)
    order = LaneOrder(32, config.run.seed, config.data.shuffle)
    seq_len = config.train.seq_len
    stream = np.concatenate([ids for _, ids in islice(documents.lane(order, 5), 9)])
    lane = open_lane(documents, config.data.packing, seq_len, order, 5)
    for row in rows_of_stream(stream, seq_len)[:3]:
        np.testing.assert_array_equal(lane.row() & ID_MASK, row)


def expected_norm(table: ParamTable, kv_copies: int = 1) -> float:
    """Root of the expected squared sum of all initial weights, K and V counted as often as they have copies."""
    total = 0.0
    for spec in table.values():
        square = spec.init.std**2 if spec.init.kind == "normal" else 1.0
        for segment in spec.segments:
            copies = kv_copies if segment.name in {"k_proj", "v_proj"} else 1
            total += copies * math.prod(spec.global_shape(segment)) * square
    return math.sqrt(total)


LOGGED = [("llama2_7b_trn1", 1, 1536, 8), ("llama2_70b_trn1", 4, 4576, 32)]
"""The READMEs of HLAT's 7b and 70b log it; 70b sums the copies that four ranks hold of each K/V head."""


@pytest.mark.parametrize(("name", "kv_copies", "logged", "bf16_spacing"), LOGGED)
def test_the_first_weights_have_the_norm_that_was_logged(
    name: str, kv_copies: int, logged: float, bf16_spacing: float
) -> None:
    table = table_of(plan(name), Mesh.build(1, 0))
    assert expected_norm(table, kv_copies) == pytest.approx(logged, abs=bf16_spacing)


def kind(global_name: str) -> str:
    return re.sub(r"\.\d+\.", ".N.", global_name)


def drawn_mean_squares(name: str) -> dict[str, tuple[float, int]]:
    """Mean square and number of the weights that two ranks draw, one at either end of the pipeline and of tp."""
    resolved = plan(name)
    parallel = resolved.config.parallel
    world = world_of(recipe(name))
    sums: dict[str, list[tuple[float, int]]] = {}
    for rank in (1, world - 1):
        mesh = Mesh.build(world, rank, tp=parallel.tp, pp=parallel.pp)
        table = table_of(resolved, mesh)
        fill = draw(table, mesh.tp, resolved.config.run.seed)
        blocks = sorted({int(result[1]) for row in table if (result := re.search(r"\.(\d+)\.", row))})
        mine = blocks[0] if rank == 1 else blocks[-1]
        for parameter, spec in table.items():
            if (result := re.search(r"\.(\d+)\.", parameter)) and int(result[1]) != mine:
                continue
            local = torch.zeros(spec.local_shape(mesh.tp), dtype=torch.bfloat16)
            fill(parameter, local)
            for piece, view in spec.views(local, mesh.tp):
                squares = float(view.float().square().sum(dtype=torch.float64))
                sums.setdefault(kind(spec.global_name(parameter, piece.segment)), []).append((squares, view.numel()))
    return {
        key: (sum(s for s, _ in item) / sum(n for _, n in item), sum(n for _, n in item)) for key, item in sums.items()
    }


@pytest.mark.parametrize(("name", "kv_copies", "logged", "bf16_spacing"), LOGGED)
def test_weights_as_they_are_drawn_have_the_norm_that_was_logged(
    name: str, kv_copies: int, logged: float, bf16_spacing: float
) -> None:
    """The shards of two ranks, at their true size, stand for all: each tensor's mean square, times its entries."""
    measured = drawn_mean_squares(name)
    total = 0.0
    for parameter, spec in table_of(plan(name), Mesh.build(1, 0)).items():
        expected = spec.init.std**2 if spec.init.kind == "normal" else 1.0
        for segment in spec.segments:
            square, number = measured[kind(spec.global_name(parameter, segment))]
            assert square == pytest.approx(expected, rel=5 * math.sqrt(2 / number) if spec.init.kind == "normal" else 0)
            copies = kv_copies if segment.name in {"k_proj", "v_proj"} else 1
            total += copies * math.prod(spec.global_shape(segment)) * square
    assert math.sqrt(total) == pytest.approx(logged, abs=bf16_spacing)
