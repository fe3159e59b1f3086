"""Log-probabilities of answers by the reference of DPO and KTO, computed once before a run that trains all weights.

The initial weights compute all pairs of the corpus, divided over dp. The results are stored in a file next to the
corpus, whose name has a hash of the weights and of the pairs. Later starts, resumes and other runs read the file.
"""

from __future__ import annotations

import io
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from nxtrain.checkpoint.convert.hf_folder import HfFolder
from nxtrain.checkpoint.convert.peft import FILES
from nxtrain.common.errors import DataError
from nxtrain.common.io.regular import read_bytes
from nxtrain.common.process.progress import Progress
from nxtrain.common.run_folder import DATA_DIR
from nxtrain.config.schema import RunConfig
from nxtrain.data import BatchShare, Data, Loader
from nxtrain.data.arrow.pairs import PairSamples
from nxtrain.data.batch_source import TokenRows
from nxtrain.data.prepare import digest
from nxtrain.data.storage import replacing
from nxtrain.train.build import build_model, build_state
from nxtrain.train.context import RunContext
from nxtrain.train.step import TrainState, answer_log_probs
from nxtrain.train.trainer import on_device

LogProbs = NDArray[np.float32]

CHECKSUM_BYTES = 8
"""Bytes of the XXH3 checksum at the end of a file of log-probabilities."""


def with_reference(context: RunContext, data: Data) -> Data:
    """Add the reference's log-probabilities to the pairs of the data; every rank calls this at the same point.

    Raises:
        DataError: A file of an earlier start is damaged.
        StorageError: The file cannot be written.
    """
    source, validation = data.source, data.validation
    assert isinstance(source, TokenRows) and isinstance(source.samples, PairSamples)
    log_probs = _of_corpus(context, source.samples)
    source = replace(source, samples=source.samples.with_reference(log_probs))
    if isinstance(validation, PairSamples):
        validation = validation.with_reference(_of_corpus(context, validation))
    return replace(data, source=source, validation=validation)


def _of_corpus(context: RunContext, samples: PairSamples) -> LogProbs:
    """Log-probability of every answer of a corpus, read from its file or computed: (kinds, documents) float32.

    Labelled answers have two kinds: the answer itself, and the answer that `swap_answers` gives to its prompt.
    """
    file = context.ranks.on_leader(lambda: _file(context.config, samples), "cannot read the first weights")
    shape = (1 + samples.labelled, samples.num_documents)
    known = context.ranks.on_leader(lambda: _read(file, shape), f"cannot read {file}")
    if known is not None:
        context.print_line(f"the reference is that of {file}")
        return known
    plan = context.plan
    backend = context.backend
    mesh = context.mesh
    state = build_state(plan, build_model(plan, backend, mesh, init="hf"), backend, mesh)
    log_probs = _compute(context, state, samples.of_all_pairs())
    context.ranks.on_leader(lambda: _write(file, log_probs), f"cannot write {file}")
    context.print_line(f"the reference of {context.config.model.hf} is written to {file}")
    return log_probs


def _compute(context: RunContext, state: TrainState, samples: PairSamples) -> LogProbs:
    """Compute the log-probabilities of all pairs, divided over dp, and gather the results on every rank."""
    train, mesh = context.config.train, context.mesh
    share = BatchShare(train.global_batch, train.micro_batch, mesh.dp.rank, mesh.dp.size)
    loader = Loader(samples, share, seed=0, shuffle=False, doc_mask=True, past_end="pad")
    indices: list[NDArray[np.int64]] = []
    values: list[LogProbs] = []
    shown = Progress("computing the reference", loader.steps_per_epoch) if context.is_leader else nullcontext()
    with shown as progress:
        for step in range(loader.steps_per_epoch):
            context.enter(0, "evaluation")
            batch = loader.batch(step)
            for kind, rows in enumerate(filter(None, (batch, batch.swapped))):
                assert rows.answers is not None
                of_answers = answer_log_probs(state, on_device(state, rows))
                if of_answers:
                    is_there = rows.answers.lengths > 0
                    documents = samples.answers(loader.indices(step)).reshape(is_there.shape)
                    log_probs = torch.stack([x.cpu() for x in of_answers]).numpy()
                    indices.append(kind * samples.num_documents + documents[is_there])
                    values.append(log_probs[is_there])
            if progress is not None:
                progress.show(step + 1)
    whole = np.full((1 + samples.labelled, samples.num_documents), np.nan, np.float32)
    # Ranks of tp and cp have equal results, and one of them sends. Pairs longer than a row stay NaN and are not used.
    speaks = mesh.tp.rank == mesh.cp.rank == 0 and bool(values)
    mine = (np.concatenate(indices), np.concatenate(values)) if speaks else None
    for part in context.ranks.gather(mine):
        if part is not None:
            whole.flat[part[0]] = part[1]
    return whole


def _file(config: RunConfig, samples: PairSamples) -> Path:
    """File of the log-probabilities: next to the corpus if that folder is local and writable, else in the run's."""
    weights = [HfFolder(Path(config.model.hf)).fingerprint(), config.finetune.method, config.precision.params]
    if config.finetune.adapter:
        folder = Path(config.finetune.adapter)
        weights += [xxhash.xxh3_64_hexdigest(read_bytes(folder / name)) for name in FILES]
    rows = [samples.identity, samples.seq_len]
    if samples.labelled:  # swapped answers depend on the rows
        rows += [samples.pairs_per_row, samples.split]
    if config.precision.fp8 != "none":
        rows.append(f"fp8={config.precision.fp8}")
    if config.model.moe_dispatch == "capacity":  # the answers of a micro-batch share the slots of an expert
        slots = f"capacity={config.model.moe_capacity_factor}"
        rows += [slots, config.train.micro_batch, samples.pairs_per_row]
    name = f"reference-{digest(*weights, sorted(config.model.config.items()), *rows)}.npy"
    location = samples.location
    if isinstance(location, Path) and os.access(location.absolute().parent, os.W_OK):
        return location.with_name(f"{location.name}.{name}")
    return config.run.dir / DATA_DIR / name


def _read(file: Path, shape: tuple[int, int]) -> LogProbs | None:
    """Read the log-probabilities of an earlier start; None if there is no file."""
    if not file.exists():
        return None
    content = read_bytes(file)
    body, checksum = content[:-CHECKSUM_BYTES], content[-CHECKSUM_BYTES:]
    if xxhash.xxh3_64_digest(body) == checksum:
        values: LogProbs = np.load(io.BytesIO(body))
        if values.size == shape[0] * shape[1]:
            return values.reshape(shape)
    raise DataError(f"{file} is damaged; delete it, and the next start computes the reference again")


def _write(file: Path, values: LogProbs) -> None:
    body = io.BytesIO()
    np.save(body, values if len(values) > 1 else values[0])  # one kind for pairs: one dimension
    with replacing(file) as draft:
        draft.write(body.getvalue() + xxhash.xxh3_64_digest(body.getvalue()))
