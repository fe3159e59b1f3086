"""Data of a run on one rank: the open data, and the loaders of its batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

from nxtrain.checkpoint.meta import Meta
from nxtrain.checkpoint.mirror import Mirrored
from nxtrain.common.run_folder import DATA_DIR
from nxtrain.data import BatchShare, Data, Loader, Samples, StreamLoader, Streams, open_data
from nxtrain.data.loader import Skips
from nxtrain.data.mixture import MixedSamples
from nxtrain.data.stream_loader import LaneOrder, Lanes, LocalLanes, Place, num_lanes, places_of
from nxtrain.data.workers import WorkerPolicy, Workers
from nxtrain.train.context import RunContext
from nxtrain.train.tokenizer import tokenizer_of_weights


def open_run_data(context: RunContext, mirrored: Mirrored | None) -> Data:
    """Open the data of the run; the leader of each disk makes its token files first."""
    config, workdir = context.config, context.config.run.dir / DATA_DIR
    data = open_data(
        config.data,
        seq_len=config.train.seq_len,
        vocab_size=context.plan.model.vocab_size,
        workdir=workdir,
        leader=mirrored.scope.leads if mirrored else context.is_leader,
        barrier=context.backend.collectives.barrier,
        of_weights=lambda: tokenizer_of_weights(config, workdir),
        validation_rows=config.train.eval_batches * config.train.global_batch if config.train.eval_every else 0,
    )
    if data.tokenizer_origin:
        context.print_line(f"the tokenizer is that of {data.tokenizer_origin}, whose ids the weights know")
    if config.data.doc_mask and config.data.source == "tokens":
        context.print_line(f"data.doc_mask: token files mark no documents, so that each id {data.end_id} ends one")
    if data.skipped:
        context.print_line(f"left out {len(data.skipped)} files that are no text, such as {data.skipped[0]}")
    return data


def train_loader(context: RunContext, data: Data, meta: Meta, skips: Skips) -> Loader | StreamLoader:
    """Loader of training batches that goes on after a step."""
    config, source = context.config, data.source
    if not isinstance(source, Streams):
        origin = meta.samples - meta.step * config.train.global_batch
        return _loader(context, source, shuffle=config.data.shuffle, past_end="wrap", origin=origin, skips=skips)
    assert data.end_id is not None
    lanes = num_lanes(config.train.global_batch)
    order = LaneOrder(lanes, config.run.seed, config.data.shuffle)
    return StreamLoader(
        _open_lanes(context, source, order),
        lanes,
        _share(context),
        end_id=data.end_id,
        doc_mask=config.data.doc_mask,
        places=places_of(meta.data_cursor, lanes, len(config.data.mixture)),
        progress=partial(source.progress, lanes, config.train.seq_len),
        skips=skips,
    )


def _open_lanes(context: RunContext, streams: Streams, order: LaneOrder) -> Callable[[Mapping[int, Place], int], Lanes]:
    """Function that opens lanes, in this process or in workers."""
    data, recovery = context.config.data, context.config.recovery
    if not data.workers:
        return partial(LocalLanes, partial(streams.source.opened(), order))
    # All replacements together take less time than the rank has before it counts as hung itself.
    timeout_s = recovery.hang_timeout_s / (data.worker_restarts + 2)
    policy = WorkerPolicy(data.workers, data.worker_restarts, timeout_s, context.backend.rank)
    return partial(Workers, streams.source, order, policy)


def validation_loader(context: RunContext, data: Data) -> Loader | None:
    """Loader of held-out batches; None if the run has no held-out data."""
    if data.validation is None:
        return None
    return _loader(context, data.validation, shuffle=False, past_end="pad")


def _loader(
    context: RunContext,
    samples: Samples | MixedSamples,
    *,
    shuffle: bool,
    past_end: Literal["wrap", "pad"],
    origin: int = 0,
    skips: Skips = (),
) -> Loader:
    return Loader(
        samples,
        _share(context),
        seed=context.config.run.seed,
        shuffle=shuffle,
        origin=origin,
        doc_mask=context.config.data.doc_mask,
        past_end=past_end,
        skips=skips,
    )


def _share(context: RunContext) -> BatchShare:
    train, dp = context.config.train, context.mesh.dp
    return BatchShare(train.global_batch, train.micro_batch, dp.rank, dp.size)
