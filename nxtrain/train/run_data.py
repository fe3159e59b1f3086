"""Data of a run on one rank: the opened data, and the loaders of training and validation batches."""

from __future__ import annotations

from dataclasses import replace

from nxtrain.checkpoint.meta import Meta
from nxtrain.checkpoint.mirror import Mirrored
from nxtrain.common.batch_sizes import SeqLengths
from nxtrain.common.run_folder import DATA_DIR
from nxtrain.config.batch_ramp import seq_lengths
from nxtrain.data import Batches, BatchOrder, BatchShare, Data, Loader, open_data
from nxtrain.data.loader import Skips
from nxtrain.data.samples import AnswerRows
from nxtrain.data.workers import WorkerPolicy
from nxtrain.train.context import RunContext
from nxtrain.train.tokenizer import tokenizer_of_weights


def open_run_data(context: RunContext, mirrored: Mirrored | None) -> Data:
    """Open the data of the run; one leader rank per disk writes the token files first."""
    config, workdir = context.config, context.config.run.dir / DATA_DIR
    validation_rows = 0
    if config.train.eval_every:
        validation_rows = config.train.eval_batches * config.train.global_batch
    data = open_data(
        config.data,
        seq_len=config.train.seq_len,
        vocab_size=context.plan.model.vocab_size,
        workdir=workdir,
        leader=mirrored.scope.leads if mirrored else context.is_leader,
        barrier=context.backend.collectives.barrier,
        of_weights=lambda: tokenizer_of_weights(config, workdir),
        validation_rows=validation_rows,
        answers=AnswerRows.of(config.finetune),
    )
    if data.tokenizer_origin:
        context.print_line(f"the tokenizer is that of {data.tokenizer_origin}, whose ids the weights know")
    if config.data.doc_mask and config.data.source == "tokens":
        context.print_line(f"data.doc_mask: token files mark no documents, so that each id {data.end_id} ends one")
    if data.skipped:
        context.print_line(f"left out {len(data.skipped)} files that are not text, such as {data.skipped[0]}")
    return data


def train_batches(context: RunContext, data: Data, meta: Meta, skips: Skips) -> Batches:
    """Training batches that continue after the step of a checkpoint."""
    config = context.config
    sizes = config.train.batch_sizes(meta.step, meta.tokens)
    workers = None  # a thread of the rank tokenizes and packs
    if config.data.workers:
        # Even if all restarts time out, the rank itself does not count as hung.
        timeout_s = config.recovery.hang_timeout_s / (config.data.worker_restarts + 2)
        workers = WorkerPolicy(config.data.workers, config.data.worker_restarts, timeout_s, context.backend.rank)
    order = BatchOrder(
        replace(_share(context), ramp=sizes, lengths=lengths_after(context, meta)),
        config.run.seed,
        config.data.shuffle,
        doc_mask=config.data.doc_mask,
        origin=meta.samples - sizes.before(meta.step),
        cursor=meta.data_cursor,
        skips=skips,
        workers=workers,
    )
    batches = data.source.batches(order)
    if meta.step and not meta.data_cursor and batches.cursor():
        context.print_line(
            f"WARNING: the checkpoint of step {meta.step} has no position in documents that are packed during "
            "training, as after a conversion from NeuronX Distributed: the data begins at its start again"
        )
    return batches


def lengths_after(context: RunContext, meta: Meta) -> SeqLengths | None:
    """Sequence length of each step after a checkpoint; None without a ramp, when each row is one sequence."""
    train = context.config.train
    sizes = train.batch_sizes(meta.step, meta.tokens)
    return seq_lengths(train.seq_ramp, train.seq_len, sizes, step=meta.step, tokens=meta.tokens)


def validation_loader(context: RunContext, data: Data) -> Loader | None:
    """Loader of held-out batches; None if the run has no held-out data."""
    if data.validation is None:
        return None
    return Loader(
        data.validation,
        _share(context),
        seed=context.config.run.seed,
        shuffle=False,
        doc_mask=context.config.data.doc_mask,
        past_end="pad",
    )


def _share(context: RunContext) -> BatchShare:
    train, dp = context.config.train, context.mesh.dp
    return BatchShare(train.global_batch, train.micro_batch, dp.rank, dp.size)
