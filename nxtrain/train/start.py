"""Where a run begins: from drawn weights, from a Hugging Face folder, or from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

from nxtrain.backends.base import Backend
from nxtrain.checkpoint import layout
from nxtrain.checkpoint.chunks import MODEL, Shards
from nxtrain.checkpoint.load import load
from nxtrain.checkpoint.meta import Meta, read_meta
from nxtrain.checkpoint.ranks import by_leader
from nxtrain.config.check import Resolved
from nxtrain.errors import CheckpointError, DamagedError
from nxtrain.mesh import Mesh
from nxtrain.train.build import build_model, build_state
from nxtrain.train.identity import Inputs, meta_at, refuse_drift
from nxtrain.train.step import TrainState


def start(
    plan: Resolved, backend: Backend, mesh: Mesh, inputs: Inputs, say: Callable[[str], None] = lambda line: None
) -> tuple[TrainState, Meta]:
    """Build this rank's state and give it its first values; says where the run stands.

    With `checkpoint.resume=auto`, a checkpoint that is damaged is put aside, and the one before it is taken.

    Args:
        plan: The checked configuration.
        backend: This rank's device.
        mesh: The axes of this rank.
        inputs: Identity of what the run reads.
        say: Takes lines for people.

    Raises:
        CheckpointError: The checkpoint to continue is damaged or belongs to another run.
        ConfigError: The Hugging Face folder of `model.init=hf` does not fit.
    """
    fresh = meta_at(0, plan, inputs)

    def choose() -> Path | None:
        return by_leader(lambda: _checkpoint(plan), mesh, backend.host_group, "cannot look for checkpoints")

    checkpoint = choose()
    first: Literal["draw", "hf"] = "hf" if plan.config.model.init == "hf" else "draw"
    model = build_model(plan, backend, mesh, init=first if checkpoint is None else "zeros")
    state = build_state(plan, model, backend, mesh)
    while checkpoint is not None:
        try:
            return state, _resume(state, checkpoint, fresh, plan)
        except DamagedError as error:
            if plan.config.checkpoint.resume != "auto":
                raise
            say(f"{error}; {_put_aside(checkpoint, state)}")
        checkpoint = choose()
    return state, fresh


def _resume(state: TrainState, checkpoint: Path, fresh: Meta, plan: Resolved) -> Meta:
    backend = state.backend
    action = f"cannot load {checkpoint}"
    meta = by_leader(lambda: read_meta(checkpoint), state.mesh, backend.host_group, action)
    refuse_drift(checkpoint, meta, fresh.model_copy(update={"kinds": tuple(shards_of(state))}), plan)
    restore(state, checkpoint, weights_only=meta.step == 0)  # step 0 is a conversion
    if meta.step == 0:
        return fresh
    state.optimizer.num_updates.copy_(backend.put(torch.full((2,), float(meta.step))))
    return meta


def _put_aside(checkpoint: Path, state: TrainState) -> str:
    aside = by_leader(
        lambda: layout.quarantine(checkpoint), state.mesh, state.backend.host_group, f"cannot put aside {checkpoint}"
    )
    return f"the checkpoint is put aside as {aside.name}, and the one before it is tried"


def shards_of(state: TrainState) -> Shards:
    """Every tensor that a checkpoint holds: the weights, in their own type, and the optimizer's state."""
    weights = {name: shard.detach().to(state.precision.params) for name, shard in state.data_parallel.shards.items()}
    return {MODEL: weights, **state.optimizer.state}


def restore(state: TrainState, checkpoint: Path, *, weights_only: bool) -> None:
    """Fill a state from a checkpoint.

    Raises:
        DamagedError: A file of it is not what was written.
        CheckpointError: It does not fit.
    """
    shards = shards_of(state)
    kinds = {MODEL: shards[MODEL]} if weights_only else shards
    load(checkpoint, kinds, state.layout, process_group=state.backend.host_group)
    settle(state, shards, weights_only=weights_only)


@torch.no_grad()
def settle(state: TrainState, shards: Shards, *, weights_only: bool) -> None:
    """Bring what was loaded to where the next step reads it; without the optimizer's state, that starts anew."""
    masters = {} if weights_only else state.optimizer.state.get("master", {})
    for name, shard in state.data_parallel.shards.items():
        # A shard of the weights' own type was filled in place, and one that is a master has more digits than they.
        if shard.dtype != state.precision.params and shard is not masters.get(name):
            shard.copy_(shards[MODEL][name])
    if weights_only:
        state.optimizer.reset()
    state.data_parallel.publish()


def _checkpoint(plan: Resolved) -> Path | None:
    resume = plan.config.checkpoint.resume
    if resume == "never":
        return None
    if resume != "auto":
        return layout.resolve(Path(resume))
    folder = plan.config.run.dir / layout.FOLDER
    found = layout.newest(folder)
    if found is None and (damaged := layout.quarantined(folder)):
        raise CheckpointError(
            f"every checkpoint of {folder} is damaged: {', '.join(path.name for path in damaged)}. Use "
            "checkpoint.resume=PATH of another one, or checkpoint.resume=never to start from scratch"
        )
    return found
