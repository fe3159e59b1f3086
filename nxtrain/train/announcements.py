"""Lines with which a run begins: backend and mesh, then model, data and the step from which the run goes on."""

from __future__ import annotations

from nxtrain.checkpoint.meta import Meta
from nxtrain.data import Data
from nxtrain.train.context import RunContext


def announce(context: RunContext) -> None:
    """Print the backend, the mesh, and notes of the backend and its layers."""
    backend, mesh = context.backend, context.mesh
    degrees = f"{_pipeline(context)}tp {mesh.tp_size}, dp {mesh.dp_size}{_sharding(context)}"
    context.print_line(f"backend {backend.name} ({context.reason}); {mesh.world} ranks: {degrees}")
    for note in dict.fromkeys((*backend.binding.notes(), *backend.notes())):
        context.print_line(note)
    if context.config.precision.params == "bf16":
        warning = backend.diagnostics.bf16_warning()
        if warning:
            context.print_line(warning)


def announce_start(context: RunContext, data: Data, meta: Meta) -> None:
    """Print the model, the data, and the step after which the run continues."""
    config, family = context.config, context.plan.family
    beginning = "starts from scratch"
    if meta.step:
        beginning = f"continues after step {meta.step}"
    elif config.model.init == "hf":
        beginning = f"starts from the weights of model.hf={config.model.hf}"
    context.print_line(
        f"model {family.name}, {context.plan.dimensions.num_params:,} parameters; "
        f"data {data.source.describe()} of {config.train.seq_len} tokens; {beginning}"
    )


def _pipeline(context: RunContext) -> str:
    parallel, size = context.config.parallel, context.mesh.pp_size
    if size == 1:
        return ""
    if parallel.virtual_pp > 1:
        return f"pp {size} of {parallel.virtual_pp} chunks each, "
    if parallel.schedule == "zero_bubble":
        return f"pp {size} (zero_bubble), "
    return f"pp {size}, "


def _sharding(context: RunContext) -> str:
    shard, size = context.config.parallel.shard, context.mesh.shard_size
    if shard == "none":
        return ""
    if size == 1:
        return f"; one rank holds all state, so that parallel.shard={shard} changes nothing"
    return f", state cut over {size} of them ({shard})"
