"""Where a run begins: from drawn weights, from a Hugging Face folder, or from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from nxtrain.backends.base import Backend
from nxtrain.checkpoint import layout
from nxtrain.checkpoint.chunks import MODEL, Shards
from nxtrain.checkpoint.load import load
from nxtrain.checkpoint.meta import Meta, read_meta
from nxtrain.config.check import Resolved
from nxtrain.errors import CheckpointError
from nxtrain.mesh import Mesh
from nxtrain.precision import Precision
from nxtrain.train.build import build_model, build_state
from nxtrain.train.step import TrainState


def start(plan: Resolved, backend: Backend, mesh: Mesh, data_fingerprint: str) -> tuple[TrainState, Meta]:
    """Build this rank's state and give it its first values; says where the run stands.

    Raises:
        CheckpointError: The checkpoint to continue is damaged or belongs to another run.
        ConfigError: The Hugging Face folder of `model.init=hf` does not fit.
    """
    config, precision = plan.config, Precision.of(plan.config.precision)
    checkpoint = _checkpoint(plan)
    fresh = Meta(
        step=0,
        samples=0,
        tokens=0,
        seed=config.run.seed,
        family=plan.family.name,
        config=plan.model.model_dump(mode="json"),
        dtype=precision.params_name,
        state_dtype=precision.state_name,
        data_fingerprint=data_fingerprint,
    )
    first: Literal["draw", "hf"] = "hf" if config.model.init == "hf" else "draw"
    model = build_model(plan, backend, mesh, init=first if checkpoint is None else "zeros")
    state = build_state(plan, model, backend, mesh)
    if checkpoint is None:
        return state, fresh
    meta = read_meta(checkpoint)
    _refuse_drift(checkpoint, meta, fresh.model_copy(update={"kinds": tuple(shards_of(state))}), plan)
    restore(state, checkpoint, weights_only=meta.step == 0)  # step 0 is a conversion
    if meta.step == 0:
        return state, fresh
    state.optimizer.num_updates.copy_(backend.put(torch.full((2,), float(meta.step))))
    return state, meta


def shards_of(state: TrainState) -> Shards:
    """Every tensor that a checkpoint holds: the weights, in their own type, and the optimizer's state."""
    weights = {name: shard.detach().to(state.precision.params) for name, shard in state.data_parallel.shards.items()}
    return {MODEL: weights, **state.optimizer.state}


def restore(state: TrainState, checkpoint: Path, *, weights_only: bool) -> None:
    """Fill a state from a checkpoint.

    Raises:
        CheckpointError: It is damaged or does not fit.
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
    if resume == "auto":
        return layout.newest(plan.config.run.dir / layout.FOLDER)
    return layout.resolve(Path(resume))


def _refuse_drift(checkpoint: Path, meta: Meta, fresh: Meta, plan: Resolved) -> None:
    """A run goes on only as what it was; weights alone may start any run of their shape."""
    keys = ["family", "config"]
    if meta.step:
        keys += ["dtype", "state_dtype", "seed", "data_fingerprint"]
    differences = [
        f"{key} is {getattr(meta, key)!r} there and {getattr(fresh, key)!r} here"
        for key in keys
        if getattr(meta, key) != getattr(fresh, key)
    ]
    if meta.step and set(meta.kinds) != set(fresh.kinds):
        there, here = (", ".join(sorted({*kinds} - {MODEL})) for kinds in (meta.kinds, fresh.kinds))
        update = plan.config.precision.update
        differences.append(f"its optimizer kept {there}, and precision.update={update} keeps {here} here")
    batch = plan.config.train.global_batch
    if meta.samples != meta.step * batch:
        differences.append(f"train.global_batch is {meta.samples // meta.step} there and {batch} here")
    if differences:
        raise CheckpointError(
            f"{checkpoint} belongs to another run: {'; '.join(differences)}. Use another run.dir, "
            "checkpoint.resume=never, or the configuration that the checkpoint was made with"
        )
