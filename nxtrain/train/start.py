"""Start of a run's training state from drawn weights, a Hugging Face folder, a checkpoint, or the memory of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from nxtrain.checkpoint.load import load
from nxtrain.checkpoint.meta import Meta
from nxtrain.checkpoint.mirror import TIMEOUT_S, Mirrored
from nxtrain.checkpoint.resume import ResumePlanner
from nxtrain.checkpoint.shards import MODEL, Shards
from nxtrain.common.distributed.agreement import Ranks
from nxtrain.common.errors import DamagedError
from nxtrain.common.io.object_store import Location, location_of
from nxtrain.common.io.read_retry import retry_budget
from nxtrain.config.check import Resolved
from nxtrain.config.model_folder import whole_folder
from nxtrain.nn.dropout import resume_dropout
from nxtrain.train.build import build_model, build_state
from nxtrain.train.compatibility import RunInputs, changes, meta_at, refuse_drift
from nxtrain.train.context import RunContext
from nxtrain.train.health.rollbacks import Rollbacks
from nxtrain.train.rank_memory import AgreedStep, RankMemory, StepNumbers
from nxtrain.train.schedule_change import rate_changes, with_rewarming
from nxtrain.train.step import TrainState
from nxtrain.train.tokenizer import read_known, refuse_other


def start(
    context: RunContext,
    inputs: RunInputs,
    mirrored: Mirrored | None = None,
    rollbacks: Rollbacks | None = None,
    memory: RankMemory | None = None,
) -> tuple[TrainState, Meta, bool]:
    """Build this rank's training state and fill it with its initial values.

    With `checkpoint.resume=auto`, a damaged checkpoint is quarantined, and the checkpoint before it is loaded.

    Args:
        context: The run on this rank.
        inputs: Identity of the run's data and tokenizer.
        mirrored: Mirror of the checkpoints; None for no mirror.
        rollbacks: Rollbacks of the run; None for none.
        memory: Memory of this rank. If the memories of all ranks hold a whole state, the run continues from it. None
            for an empty memory.

    Returns:
        The state, the metadata of its step, and True if its weights were drawn.

    Raises:
        CheckpointError: The checkpoint to resume is damaged or belongs to another run, or the storage fails.
        ConfigError: The Hugging Face folder of `model.init=hf` does not fit the model.
    """
    plan, mesh = context.plan, context.mesh
    fresh = meta_at(0, plan, inputs)
    retry_budget.begin()
    ranks = Ranks(mesh, context.backend.host_group)
    if mirrored is not None or not isinstance(location_of(plan.config.checkpoint.resume), Path):
        # Ranks whose shards are loaded wait for the ranks that still read, so the timeout must fit remote storage.
        ranks = Ranks(mesh, context.backend.background_group(TIMEOUT_S) or context.backend.host_group)
    planner = ResumePlanner(
        plan.config,
        mirrored,
        ranks,
        context.print_line,
        restarted=context.placement.is_restart,
        job=context.placement.job,
    )
    if rollbacks is not None and rollbacks.pending is not None:
        planner.rewind(rollbacks.pending)
    sources = planner.choose()
    agreement = None if memory is None else memory.agree(ranks)
    reads_hf = plan.config.model.init == "hf"
    if not sources and reads_hf:
        refuse_other(whole_folder(plan.config.model.hf), inputs, plan.config.checkpoint.allow_drift)
    init: Literal["draw", "hf", "zeros"] = "draw"
    if reads_hf:
        init = "hf"
    if (sources or agreement) and not plan.config.finetune.adapts:  # neither has the frozen weights below adapters
        init = "zeros"
    model = build_model(plan, context.backend, mesh, init=init)
    state = build_state(plan, model, context.backend, mesh)
    if memory is not None and agreement is not None:
        meta = _recall(context, state, memory, agreement)
        planner.begin()
        return state, meta, False
    while sources:
        try:
            meta, damaged = _resume(state, sources, fresh, plan, ranks, trained=inputs.trained)
        except DamagedError as error:
            if not planner.is_own:
                raise
            ranks.on_leader(partial(retry_budget.hold, error), f"cannot load {sources[0]}")
            context.print_line(f"{error}; {planner.quarantine(error)}")
            sources = planner.choose()
            continue
        for replaced in damaged:
            context.print_line(f"WARNING: {replaced}; it was read from the mirror instead")
        planner.begin()
        resume_dropout(model, meta.step, plan.config.train.batch_sizes(meta.step, meta.tokens))
        meta = with_rewarming(meta, plan.config, is_own=planner.is_own)
        for changed in (changes(meta, fresh), rate_changes(meta, plan.config)):
            if changed:
                context.print_line(changed)
        return state, meta, False
    planner.begin()
    return state, fresh, not reads_hf


def _resume(
    state: TrainState, sources: Sequence[Location], fresh: Meta, plan: Resolved, ranks: Ranks, *, trained: bool
) -> tuple[Meta, list[DamagedError]]:
    """Fill the state from a checkpoint; return its metadata, and the damage on all ranks that fallbacks replaced."""
    checkpoint, *fallbacks = sources
    meta = ranks.on_leader(lambda: read_known(checkpoint), f"cannot load {checkpoint}")
    refuse_drift(checkpoint, meta, fresh.model_copy(update={"kinds": tuple(shards_of(state))}), plan, trained=trained)
    weights_only = meta.step == 0  # a converted checkpoint has no optimizer state
    replaced = restore(state, checkpoint, weights_only=weights_only, ranks=ranks, fallbacks=fallbacks)
    damaged: list[DamagedError] = []
    for of_rank in ranks.gather(replaced):
        damaged += of_rank
    if weights_only:
        return fresh, damaged
    num_updates = meta.loss_scale.get("num_updates", float(meta.step))
    state.optimizer.num_updates.copy_(state.backend.put(torch.full((2,), num_updates)))
    if state.loss_scale is not None and meta.loss_scale:
        state.loss_scale.restore(meta.loss_scale, state.backend.put)
    return meta, damaged


def _recall(context: RunContext, state: TrainState, memory: RankMemory, agreement: AgreedStep) -> Meta:
    """Fill the state from the memories of the ranks; return the metadata of its step.

    A rank that holds the step copies its own tensors. Any other rank receives each tensor from the first holder among
    its replicas.
    """
    comm, me = state.backend.collectives, state.mesh.rank
    holds = me in agreement.holders
    shards = shards_of(state)
    for kind, tensors in shards.items():
        for name, tensor in tensors.items():
            axis = state.layout.axes_of(name).replica
            group = axis.group_of(me)
            source = next(rank for rank in group if rank in agreement.holders)
            if holds:
                tensor.copy_(memory.shards[kind][name])
            else:
                tensor.copy_(comm.start_receive(tensor, axis, group.index(source)).wait())
            for position, rank in enumerate(group):
                if me == source and rank not in agreement.holders:
                    comm.start_send(tensor, axis, position).wait()
    settle(state, shards, weights_only=False)
    speaker = min(agreement.holders)
    given: StepNumbers | None = None
    if me == speaker:
        given = memory.numbers(is_finished=agreement.is_finished)
    numbers = state.ranks.gather(given)[speaker]
    assert numbers is not None, "the speaker holds the step"
    for name, counter in state.counters.items():
        counter.copy_(numbers.counters[name])
    memory.resumed, meta = numbers, numbers.meta
    resume_dropout(state.model, meta.step, context.config.train.batch_sizes(meta.step, meta.tokens))
    context.print_line(str(agreement))
    return meta


def shards_of(state: TrainState) -> Shards:
    """Tensors of a checkpoint: the weights, in the type of the parameters, and the optimizer state."""
    weights = {name: shard.detach().to(state.precision.params) for name, shard in state.data_parallel.shards.items()}
    return {MODEL: weights, **state.optimizer.state}


def restore(
    state: TrainState,
    checkpoint: Location,
    *,
    weights_only: bool,
    ranks: Ranks | None = None,
    fallbacks: Sequence[Location] = (),
) -> list[DamagedError]:
    """Fill a training state from a checkpoint; fallback locations replace files that are damaged or absent.

    Args:
        state: Training state to fill.
        checkpoint: Location of the checkpoint.
        weights_only: Load no optimizer state, and reset the optimizer.
        ranks: All ranks of the run; None for those of the state.
        fallbacks: Other locations of the same checkpoint.

    Returns:
        Damage that was found in one location and replaced from another.

    Raises:
        DamagedError: A file of the checkpoint differs from the file that was written.
        CheckpointError: The checkpoint does not fit the state.
    """
    shards = shards_of(state)
    kinds = {MODEL: shards[MODEL]} if weights_only else shards
    damaged: list[DamagedError] = []
    ranks = ranks or state.ranks
    load(checkpoint, kinds, state.layout, ranks=ranks, fallbacks=fallbacks, on_damage=damaged.append)
    settle(state, shards, weights_only=weights_only)
    return damaged


@torch.no_grad()
def settle(state: TrainState, shards: Shards, *, weights_only: bool) -> None:
    """Copy loaded weights to the parameters that the next step reads; with `weights_only`, also reset the optimizer."""
    masters = {} if weights_only else state.optimizer.state.get("master", {})
    for name, shard in state.data_parallel.shards.items():
        # Shards in the weights' type were filled in place. A shard that is a master copy is more precise than weights.
        if shard.dtype != state.precision.params and shard is not masters.get(name):
            shard.copy_(shards[MODEL][name])
    if weights_only:
        state.optimizer.reset()
    state.data_parallel.publish()
