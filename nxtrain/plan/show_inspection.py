"""Tables of `nxtrain inspect` on the terminal, with equal blocks and equal stages merged into one row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich import box
from rich.table import Table

from nxtrain.common.dimensions import EMBEDDING
from nxtrain.plan.inspection import Inspection
from nxtrain.plan.show import console
from nxtrain.plan.tensors import Held, Rank

MIB = 1 << 20


def show_inspection(inspection: Inspection, rank: int | None, *, tree: bool) -> None:
    """Print the model, its stages, and with `tree` the parameters.

    Args:
        inspection: Facts to print.
        rank: Rank whose tensors are printed; None for the first rank of every stage.
        tree: Print the parameters too.
    """
    screen, chosen = console(), inspection.chosen(rank)
    for line in _model_lines(inspection):
        screen.print(line)
    stages = Table("stage", "blocks", "and", "units", "params", "frozen", "grads", "optimizer", "MiB of a rank")
    stages.box = box.SIMPLE_HEAD
    for column in stages.columns[4:]:
        column.justify = "right"
    for row in _stage_rows(chosen):
        stages.add_row(*row)
    screen.print(stages)
    if tree:
        screen.print(_tree(chosen))
    if inspection.checkpoint is not None:
        facts = inspection.checkpoint
        degrees = " ".join(f"{axis}={size}" for axis, size in facts.mesh.items())
        screen.print(
            f"newest checkpoint: step {facts.step:,}, {facts.num_bytes:,} bytes, {facts.world} ranks: {degrees}"
        )


def _model_lines(inspection: Inspection) -> Iterator[str]:
    data, job = inspection.model_json(), inspection.job
    params = data["params"]
    dimensions = job.dimensions
    parallel = job.config.parallel
    name = data["preset"] or data["hf"] or "no preset"
    yield f"{data['family']}, {name}: {params['total']:,} parameters, of which {params['trained']:,} are trained"
    inner = f"MLP {dimensions.intermediate_size:,}"
    if dimensions.mixture is not None:
        mixture = dimensions.mixture
        inner = (
            f"{mixture.num_experts} experts of {mixture.expert_size:,}, {mixture.experts_per_token} for each token, "
            f"which passes through {dimensions.num_active_params:,} parameters"
        )
    yield (
        f"{dimensions.num_layers} blocks of {params['block']:,}: width {dimensions.hidden_size:,}, "
        f"{dimensions.num_heads} heads of {dimensions.head_size}, {dimensions.num_kv_heads} K/V heads, "
        f"{inner}"
    )
    head = "the output projection has as many"
    if dimensions.tied:
        head = "the output projection is the same matrix"
    yield f"vocabulary {dimensions.vocab_size:,}: {params['embedding']:,} parameters; {head}"
    sharing = ""
    if job.shard_size > 1:
        sharing = f", {job.shard_size} ranks share the state"
    yield (f"{job.world:,} ranks: {parallel.degrees} shard={parallel.shard}{sharing}; {job.method} training")


def _stage_rows(ranks: Sequence[Rank]) -> Iterator[tuple[str, ...]]:
    """Table rows of stages; adjacent stages are one row if they differ only in the indices of their blocks."""

    def likeness(rank: Rank) -> object:
        lengths = tuple(len(chunk) for chunk in rank.blocks)
        return lengths, tuple(held.parameter.name for held in rank.others), rank.bytes

    for _, group in groupby(ranks, likeness):
        equal = list(group)
        first, last = equal[0], equal[-1]
        blocks = _ranges(first.blocks)
        if len(equal) > 1 and len(first.blocks) == 1:
            blocks = f"{first.blocks[0].start} .. {last.blocks[0].stop - 1}, {len(first.blocks[0])} each"
        elif len(equal) > 1:
            blocks = f"{blocks}, and so on"
        number = str(first.stage) if first is last else f"{first.stage} .. {last.stage}"
        others = ", ".join(held.parameter.name.split(".")[-2] for held in first.others)
        sizes = first.bytes
        kinds = (sizes.params, sizes.frozen, sizes.grads, sizes.optimizer, sizes.to_json()["total"])
        units = str(len(first.units)) if first.units else "whole"
        yield number, blocks, others, units, *(f"{size / MIB:,.1f}" for size in kinds)


def _ranges(chunks: Sequence[range]) -> str:
    """Ranges of block indices as text, by first and last index."""
    texts = []
    for chunk in chunks:
        if len(chunk) > 1:
            texts.append(f"{chunk.start} .. {chunk.stop - 1}")
        else:
            texts.append(str(chunk.start))
    return " and ".join(texts)


def _tree(ranks: Sequence[Rank]) -> Table:
    """Table of the parameters in model order: shapes, sharded dimensions, type, MiB, and parts in checkpoints."""
    table = Table("parameter", "whole", "cut", "on a rank", "type", "MiB", "in checkpoints", box=box.SIMPLE_HEAD)
    table.columns[0].no_wrap = True
    table.columns[5].justify = "right"
    for held in _first_others(ranks, EMBEDDING):
        table.add_row(*_row(held.parameter.name, held))
    indices: list[int] = []
    for rank in ranks:
        for chunk in rank.blocks:
            indices += chunk
    end = ", each:" if len(indices) > 1 else ":"
    table.add_row(f"model.layers.{_ranges(_runs(sorted(indices)))}{end}")
    for held in ranks[0].block:
        table.add_row(*_row(f"  {held.parameter.name}", held))
    for name in ("model.norm.weight", "lm_head.weight"):
        for held in _first_others(ranks, name):
            table.add_row(*_row(held.parameter.name, held))
    return table


def _first_others(ranks: Sequence[Rank], name: str) -> Iterator[Held]:
    for rank in ranks:
        for held in rank.others:
            if held.parameter.name == name:
                yield held


def _runs(indices: Sequence[int]) -> list[range]:
    """Group ascending numbers into ranges of consecutive numbers."""
    runs: list[range] = []
    for index in indices:
        if runs and runs[-1].stop == index:
            runs[-1] = range(runs[-1].start, index + 1)
        else:
            runs.append(range(index, index + 1))
    return runs


def _row(name: str, held: Held) -> tuple[str, ...]:
    spec, parameter = held.parameter.spec, held.parameter
    cuts = ", ".join(f"{axis} dim {dim}" for axis, dim in held.cuts.items())
    if spec.tied_to:
        parts = f"copy of {spec.tied_to}"
    elif len(spec.segments) > 1:
        parts = ", ".join(f"{segment.name} {segment.size}" for segment in spec.segments)
    else:
        parts = ""
    kind = held.dtype if parameter.is_trained else f"{held.dtype}, frozen"
    size = f"{held.num_bytes / MIB:,.3f}"
    return name.removesuffix(".weight"), _shape(spec.shape), cuts or "whole", _shape(held.shape), kind, size, parts


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(str(size) for size in shape)
