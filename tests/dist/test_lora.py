"""Low-rank adapters on every kind of layout: parity with PEFT and `torch.optim`, frozen weights, dropout, export."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from nxtrain.backends import open_backend
from nxtrain.backends.base import Backend
from nxtrain.common.mesh import Mesh
from nxtrain.config.batch_ramp import RampStageConfig
from nxtrain.config.check import Resolved
from nxtrain.nn import offload
from nxtrain.nn.dropout import Dropout, _hashes
from nxtrain.nn.lora import is_adapter, scale_of
from nxtrain.train.compatibility import RunInputs, meta_at
from nxtrain.train.results import save_adapter
from nxtrain.train.step import eval_step, train_step
from tests.support.drawn import SEED, one_in
from tests.support.drawn_runs import LOSS, check_drawn, ours
from tests.support.layouts import Degrees, covering_array
from tests.support.lora import (
    DrawnAdapters,
    adapters_of,
    all_weights,
    described,
    draw_adapters,
    draw_quantized,
    restored,
    wanted_of_one_rank,
    wanted_of_peft,
    with_dropout,
    with_keys,
)
from tests.support.models import MIXTURES, changed, weights_of
from tests.support.parity import Course, batches, layout, local_batch, run_ours, start, whole
from tests.support.ranks import RankPool

_ALL = covering_array(SEED, 64)
LAYOUTS = [
    *[degrees for degrees in _ALL if degrees.tp > 1 and not degrees.sequence_parallel][:4],
    *[degrees for degrees in _ALL if degrees.sequence_parallel][:3],
    Degrees(tp=2, dp=2, shard="zero1", sequence_parallel=True),
    Degrees(dp=3, shard="grad_op"),
    Degrees(pp=2, dp=2, shard="full"),
    Degrees(tp=2, cp=2, cp_layout="zigzag", cp_method="ring", sequence_parallel=True),
]
QUANTIZED = [
    Degrees(),
    Degrees(pp=2, dp=1),
    Degrees(tp=2, sequence_parallel=True),
    Degrees(dp=2, shard="full"),
    Degrees(tp=2, dp=2, shard="zero1"),
    Degrees(dp=2, shard="grad_op"),
    Degrees(dp=4, shard="hybrid"),
]
_STAGES = [degrees for degrees in _ALL if degrees.pp > 1 and degrees.world <= 4]
DROPPED = [
    next(degrees for degrees in _STAGES if degrees.virtual_pp > 1),
    next(degrees for degrees in _STAGES if degrees.schedule == "zero_bubble"),
    next(degrees for degrees in _STAGES if degrees.tp > 1 and degrees.sequence_parallel),
    next(degrees for degrees in _STAGES if degrees.dp > 1),
    *[degrees for degrees in _ALL if degrees.tp > 1 and degrees.pp == 1 and degrees.world <= 4][:3],
    Degrees(tp=2, cp=2, cp_layout="striped", cp_method="gather", sequence_parallel=True),
    Degrees(pp=2, cp=2, cp_layout="zigzag", cp_method="ring"),
]
LORA = {"method": "lora", "r": 4, "alpha": 8.0}


def adapted(shape: str = "gqa2", finetune: dict[str, Any] | None = None, **degrees: Any) -> Resolved:
    return changed(layout(shape, **{"tp": 1, **degrees}), finetune={**LORA, **(finetune or {})})


def weights(resolved: Resolved, *, zero_b: bool = False) -> dict[str, Tensor]:
    """Whole weights of base and adapters; as at the beginning of a run, if `zero_b`."""
    base = weights_of(resolved)
    adapters = adapters_of(resolved, base)
    if zero_b:
        adapters = {n: torch.zeros_like(t) if n.endswith("lora_B") else t for n, t in adapters.items()}
    return {**base, **adapters}


@pytest.mark.parametrize("index", one_in(4, range(len(LAYOUTS))), ids=lambda index: f"{index}-{LAYOUTS[index]}")
def test_a_drawn_run_of_any_layout_equals_peft(ranks: RankPool, index: int) -> None:
    run = draw_adapters("lora", SEED, index, LAYOUTS[index])
    courses = ranks.run(run.degrees.world, ours, run, all_weights(run))
    check_drawn(courses, wanted_of_peft(run), run, described(run))


@pytest.mark.parametrize("index", one_in(2, range(len(QUANTIZED))), ids=lambda index: f"{index}-{QUANTIZED[index]}")
def test_a_drawn_run_above_quantized_weights_equals_peft_above_restored_ones(ranks: RankPool, index: int) -> None:
    run = draw_quantized("qlora", SEED, index, QUANTIZED[index])
    if run.degrees.shard == "hybrid":
        run = with_keys(run, parallel__shard_size=2, parallel__offload=True)
    courses = ranks.run(run.degrees.world, ours, run, all_weights(run))
    want = wanted_of_peft(run)
    check_drawn(courses, want, run, described(run))
    whole_base = replace(run, finetune=(*run.finetune, ("method", "lora")))
    assert abs(wanted_of_peft(whole_base).losses[0] - want.losses[0]) > 10 * LOSS


BESIDE_EXPERTS = [
    Degrees(),
    Degrees(tp=2, sequence_parallel=True),
    Degrees(pp=2, dp=2),
    Degrees(tp=2, dp=2, shard="full"),
]


@pytest.mark.parametrize("index", range(len(BESIDE_EXPERTS)), ids=lambda index: f"{index}-{BESIDE_EXPERTS[index]}")
def test_adapters_of_attention_beside_frozen_experts_equal_peft(ranks: RankPool, index: int) -> None:
    """The losses of the frozen routers have gradients, too."""
    run = draw_adapters("lora beside experts", SEED, index, BESIDE_EXPERTS[index], family=MIXTURES[index % 2])
    run = replace(run, finetune=(*run.finetune, ("targets", ("q_proj", "v_proj", "o_proj"))))
    courses = ranks.run(run.degrees.world, ours, run, all_weights(run))
    check_drawn(courses, wanted_of_peft(run), run, described(run))


OFFLOADED: list[tuple[Degrees, list[str]]] = [
    (Degrees(), ["optimizer"]),
    (Degrees(pp=2), ["optimizer", "activations"]),
    (Degrees(tp=2, dp=2, shard="zero1"), ["optimizer"]),
    (Degrees(dp=2, shard="full"), ["params"]),
    (Degrees(dp=2, shard="full"), ["params", "optimizer", "activations"]),
    (Degrees(dp=2, shard="grad_op"), ["params", "optimizer"]),
]


@pytest.mark.parametrize("index", range(len(OFFLOADED)), ids=lambda index: f"{index}-{OFFLOADED[index]}")
def test_a_drawn_run_above_quantized_weights_with_state_on_the_host_equals_peft(ranks: RankPool, index: int) -> None:
    """The reference is PEFT above weights that bitsandbytes quantized and restored."""
    degrees, offloaded = OFFLOADED[index]
    run = with_keys(draw_quantized("qlora on the host", SEED, index, degrees), parallel__offload=offloaded)
    courses = ranks.run(run.degrees.world, ours, run, all_weights(run))
    check_drawn(courses, wanted_of_peft(run), run, described(run))


ON_HOST = [Degrees(), Degrees(pp=2), Degrees(dp=2, shard="full"), Degrees(tp=2, sequence_parallel=True)]


def of_copies(backend: Backend, run: DrawnAdapters, given: dict[str, Tensor]) -> tuple[Course, set[torch.dtype]]:
    """The course of a rank whose host memory is apart from the device's, and the types of what went there."""
    dtypes: set[torch.dtype] = set()

    def copy(x: Tensor) -> Tensor:
        dtypes.add(x.dtype)
        return x.detach().clone()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "to_host", copy)
        return ours(backend, run, given), dtypes


@pytest.mark.parametrize("method", ["lora", "qlora"])
@pytest.mark.parametrize("index", range(len(ON_HOST)), ids=lambda index: f"{index}-{ON_HOST[index]}")
def test_activations_on_the_host_change_no_bit_and_frozen_weights_stay(
    ranks: RankPool, index: int, method: str
) -> None:
    drawer = draw_quantized if method == "qlora" else draw_adapters
    run = with_keys(drawer("on the host", SEED, index, ON_HOST[index]), parallel__offload=[])
    run = with_dropout(run) if index % 2 else run
    given, world = all_weights(run), run.degrees.world
    plain = ranks.run(world, ours, run, given)
    moved = ranks.run(world, of_copies, with_keys(run, parallel__offload=["activations"]), given)
    for course, (result, dtypes) in zip(plain, moved, strict=True):
        assert dtypes
        assert (course.losses, course.norms) == (result.losses, result.norms)
        assert all(torch.equal(course.weights[name], tensor) for name, tensor in result.weights.items())
        assert torch.uint8 not in dtypes, "packed weights stay on the device"


def test_the_layouts_sum_gradients_in_every_way() -> None:
    kinds = {(layout.tp > 1, layout.sequence_parallel, layout.pp > 1) for layout in LAYOUTS}
    assert {(True, False, True), (True, True, True), (True, True, False)} <= kinds


# --- frozen weights ------------------------------------------------------------------------------------------------


def first_step(backend: Backend, resolved: Resolved, given: dict[str, Tensor]) -> tuple[float, dict[str, Any]]:
    """Loss of the first step, and the state behind it: frozen weights that moved, their storage, what is kept."""
    state = start(backend, resolved, given)
    frozen = {name: p for name, p in state.model.named_parameters() if not p.requires_grad}
    before = {name: _bytes(p).clone() for name, p in frozen.items()}
    (batch,) = batches(resolved, 1)
    step = train_step(state, local_batch(state, batch, resolved.config.train.micro_batch), 1e-2)
    moved = [name for name, p in frozen.items() if not torch.equal(_bytes(p), before[name])]
    result = {
        "moved": moved,
        "gradients": [name for name, p in frozen.items() if p.grad is not None],
        "kept": sorted({name for tensors in state.optimizer.state.values() for name in tensors}),
        "reduced": sorted(state.data_parallel.shards),
        "dtypes": {str(p.dtype) for p in frozen.values()},
        "num_params": state.num_params,
    }
    return backend.fetch({"loss": step.loss})["loss"], result


def _bytes(parameter: Tensor) -> Tensor:
    """Bytes of this rank's part; quantized weights are not numbers of their type."""
    own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return own.detach().view(torch.uint8)


@pytest.mark.parametrize(
    ("world", "degrees"),
    [
        (2, {"tp": 2, "sp": True}),
        (2, {"dp": 2, "shard": "zero1", "micro": 1}),
        (2, {"dp": 2, "shard": "full", "micro": 2, "params": "bf16"}),
        (2, {"pp": 2, "micro": 2}),
    ],
    ids=["tp2-sp", "dp2-zero1", "dp2-full-bf16", "pp2"],
)
@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_a_run_begins_as_its_base_and_moves_adapters_only(
    ranks: RankPool, world: int, degrees: dict[str, Any], method: str
) -> None:
    resolved = adapted(config={"hidden_size": 128, "intermediate_size": 128}, finetune={"method": method}, **degrees)
    given = weights(resolved, zero_b=True)
    dtype = torch.bfloat16 if degrees.get("params") == "bf16" else torch.float32
    seen = restored({name: tensor.to(dtype) for name, tensor in given.items()}) if method == "qlora" else given
    base = ranks.run(world, first_step, changed(resolved, finetune={"method": "full"}), seen)
    for (loss, actual), (expected, _) in zip(ranks.run(world, first_step, resolved, given), base, strict=True):
        assert loss == expected
        assert actual["moved"] == actual["gradients"] == []
        assert actual["kept"] == actual["reduced"] and all(map(is_adapter, actual["kept"]))
        assert actual["dtypes"] == {str(dtype)}
        assert actual["num_params"] == sum(tensor.numel() for name, tensor in given.items() if is_adapter(name))


# --- dropout -------------------------------------------------------------------------------------------------------


def dropped_losses(backend: Backend, resolved: Resolved, given: dict[str, Tensor]) -> list[float]:
    return run_ours(backend, resolved, 3, given).losses


@pytest.mark.parametrize("index", one_in(4, range(len(DROPPED))), ids=lambda index: f"{index}-{DROPPED[index]}")
def test_masks_of_a_drawn_run_of_any_layout_are_those_of_one_rank(ranks: RankPool, index: int) -> None:
    run = with_dropout(draw_adapters("dropout", SEED, index, DROPPED[index]))
    courses = ranks.run(run.degrees.world, ours, run, all_weights(run))
    check_drawn(courses, wanted_of_one_rank(run), run, described(run))


def test_masks_leave_out_their_share_and_are_new_in_each_pass() -> None:
    resolved = changed(adapted(finetune={"dropout": 0.25}, micro=2), train={"seq_len": 64})
    dropout = Dropout(resolved.config, Mesh(1, 0).dp, torch.arange(resolved.config.train.seq_len), lambda x: x)
    layer, other = (dropout.of_layer(name, range(96)) for name in ("layer", "other"))
    block = torch.nn.Identity()
    dropout.attach(torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([block])}), [1])
    x, masks = torch.ones(64, 2, 96), []
    for _ in range(4):
        block(x)
        masks.append(layer(x))
    kept = [mask > 0 for mask in masks]
    assert [float(kept_part.float().mean()) for kept_part in kept] == pytest.approx([0.75] * 4, abs=0.02)
    assert all(
        torch.equal(mask[kept_part], torch.full_like(mask[kept_part], 4 / 3))
        for mask, kept_part in zip(masks, kept, strict=True)
    )
    pairs = [(kept[0], kept[1]), (kept[1], kept[2]), (kept[3], other(x) > 0)]
    pairs += [(kept[3][:, 0], kept[3][:, 1]), (kept[3][:32], kept[3][32:]), (kept[3][..., :48], kept[3][..., 48:])]
    for one, another in pairs:  # independent masks agree in 0.75^2 + 0.25^2 of the entries
        assert float((one == another).float().mean()) == pytest.approx(0.625, abs=0.03)
    with torch.no_grad():
        block(x)
    assert torch.equal(layer(x), x), "evaluation leaves nothing out"


@pytest.mark.parametrize("dp", [1, 2])
def test_sequences_of_a_ramp_are_numbered_in_their_order_on_any_number_of_ranks(dp: int) -> None:
    ramp = (RampStageConfig(global_batch=2, samples=4),)
    resolved = changed(adapted(finetune={"dropout": 0.25}, micro=1), train={"global_batch": 4, "batch_ramp": ramp})
    sizes = resolved.config.train.batch_sizes(3, 8 * resolved.config.train.seq_len)
    results: dict[int, list[int]] = {}
    for rank in range(dp):
        axis, block = Mesh.build(dp, rank, dp=dp).dp, torch.nn.Identity()
        dropout = Dropout(resolved.config, axis, torch.arange(16), lambda x: x)
        dropout.attach(torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([block])}), [1])
        for step, size in enumerate((2, 2, 4)):
            for _ in range(size // dp):
                block(torch.ones(1))
                assert dropout.sequences is not None
                results.setdefault(step, []).extend(dropout.sequences.tolist())
        dropout.begin(3, sizes)
        block(torch.ones(1))
        assert dropout.sequences is not None
        results.setdefault(3, []).extend(dropout.sequences.tolist())
    numbered = _hashes(torch.arange(12)).tolist()
    assert results[0] + results[1] + results[2] == numbered[:8]
    assert results[3] == [numbered[8], numbered[10]][:dp]


def test_evaluation_between_steps_changes_no_mask() -> None:
    resolved, backend = adapted(finetune={"dropout": 0.5}), open_backend("cpu")
    given = weights(resolved)
    state = start(backend, resolved, given)
    losses = []
    for batch in batches(resolved, 3):
        local = local_batch(state, batch, resolved.config.train.micro_batch)
        eval_step(state, local)
        losses.append(backend.fetch({"loss": train_step(state, local, resolved.config.optim.lr).loss})["loss"])
    assert losses == dropped_losses(backend, resolved, given)


# --- merged weights ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_merged_weights_give_the_logits_of_the_trained_model(method: str) -> None:
    """Of the forward pass of training, beside adapters that move the logits by a multiple of what they are."""
    resolved, backend = adapted(config={"intermediate_size": 128}, finetune={"method": method}), open_backend("cpu")
    given = weights(resolved)
    base = restored(given) if method == "qlora" else given
    scale = scale_of(resolved.config.finetune)
    merged = {}
    for name, weight in base.items():
        layer = name.removesuffix(".weight")
        if not is_adapter(name):
            update = [base[f"{layer}.{leaf}"] for leaf in ("lora_B", "lora_A")] if f"{layer}.lora_A" in base else []
            merged[name] = weight + scale * (update[0] @ update[1]) if update else weight
    tokens = batches(resolved, 1)[0][:, :-1]
    results = []
    for run, values in ((resolved, given), (changed(resolved, finetune={"method": "full"}), merged)):
        with torch.no_grad():
            results.append(start(backend, run, values).lm.logits(tokens))
    with torch.no_grad():
        of_base = start(backend, changed(resolved, finetune={"method": "full"}), base).lm.logits(tokens)
    assert (results[0] - of_base).abs().max() > 0.1
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-5)


# --- export --------------------------------------------------------------------------------------------------------


def exported(backend: Backend, resolved: Resolved, given: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    state = start(backend, resolved, given)
    save_adapter(folder, state, meta_at(0, resolved, RunInputs("", base="some weights")))
    return {name: shard.detach() for name, shard in state.data_parallel.shards.items()}


@pytest.mark.parametrize(
    ("world", "degrees"),
    [(4, {"tp": 2, "pp": 2, "sp": True}), (4, {"tp": 4}), (2, {"dp": 2, "shard": "zero1", "micro": 1})],
    ids=["tp2-pp2-sp", "tp4-copied-heads", "dp2-zero1"],
)
def test_ranks_write_their_adapter_whole(ranks: RankPool, tmp_path: Path, world: int, degrees: dict[str, Any]) -> None:
    resolved = adapted(**degrees)
    given = weights(resolved)
    ranks.run(world, exported, resolved, given, tmp_path / "adapter")
    actual = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    expected = {f"base_model.model.{n}.weight": tensor for n, tensor in given.items() if is_adapter(n)}
    assert actual.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(actual[name], tensor)] == []


# --- a small task --------------------------------------------------------------------------------------------------


def chain(seed: int, number: int, *, new: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Batches of a Markov chain in which each token has four equally likely successors; its entropy is log 4.

    Args:
        seed: Of the rows.
        number: Of the batches.
        new: Tokens whose successors are others than those of the chain that the base knows.
    """
    generator = torch.Generator().manual_seed(5)
    frequent, others = (torch.stack([torch.randperm(64, generator=generator)[:4] for _ in range(64)]) for _ in range(2))
    successors = torch.cat([others[:new], frequent[new:]])
    generator.manual_seed(seed)
    rows = [torch.randint(0, 64, (16 * number,), generator=generator)]
    for _ in range(32):
        rows.append(successors[rows[-1], torch.randint(0, 4, (16 * number,), generator=generator)])
    tokens = torch.stack(rows, dim=1)
    return [(part[:, :-1], part[:, 1:]) for part in tokens.split(16)]


def test_adapters_reach_the_loss_of_full_fine_tuning() -> None:
    backend = open_backend("cpu")
    shape: dict[str, Any] = {"config": {"vocab_size": 64, "num_hidden_layers": 1}}
    optim = {"lr": 5e-3, "clip": 1.0, "eps": 1e-8}
    full = changed(layout("gqa2", tp=1, batch=16, micro=16, **shape), optim=optim)
    given = whole([run_ours(backend, full, 1, weights_of(full), chain(1, 120)).weights], full)
    lora = changed(full, finetune={"method": "lora", "r": 16, "alpha": 32.0})
    begun = {n: t * (not n.endswith("lora_B")) for n, t in adapters_of(lora, given).items()}
    data = chain(2, 60, new=8)
    of_full = run_ours(backend, full, 1, given, data).losses
    of_lora = run_ours(backend, lora, 1, {**given, **begun}, data).losses
    last = [sum(losses[-20:]) / 20 for losses in (of_full, of_lora)]
    assert of_full[0] == of_lora[0] > 1.4 * last[0]
    assert last[1] == pytest.approx(last[0], rel=0.02)
