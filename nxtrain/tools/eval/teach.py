"""Generation of a teacher file for distillation (`data.teacher`).

The file has the most likely tokens of a teacher model for each target of a token file.
"""

from __future__ import annotations

import os
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nxtrain.backends import choose, open_backend
from nxtrain.backends.base import Backend
from nxtrain.common.errors import ConfigError, DivergedError
from nxtrain.common.io.object_store import location_of
from nxtrain.common.mesh import Mesh
from nxtrain.common.process.console import standard_error
from nxtrain.common.process.progress import Progress
from nxtrain.common.vocab import PROBABILITY_UNITS
from nxtrain.data.samples import FileSamples, header
from nxtrain.data.storage import open_file, replacing
from nxtrain.tools.eval.trained import Trained


def teach(address: str, rows: str, out: Path, k: int) -> None:
    """Write the K most likely tokens of a teacher model for each target; every rank calls this function.

    The ranks share the model by tensor parallelism.

    Args:
        address: Location of the teacher: a checkpoint, a run folder, a mirror or its address, or a Hugging Face folder.
        rows: .npy file of token ids, (rows, S + 1).
        out: .npy file to write, in the format of `nxtrain.data.teacher`.
        k: Number of tokens for each target.
    """
    model = Trained.find(address, reads_text=False)
    vocab_size = model.config.vocab_size
    if k > vocab_size:
        raise ConfigError(f"--k {k} exceeds the {vocab_size} tokens of the vocabulary; use {vocab_size} or less")
    location = location_of(rows)
    if isinstance(location, Path) and os.path.realpath(out) == os.path.realpath(location):
        raise ConfigError(f"--out {out} is the same file as --rows; it would replace the token ids; give another name")
    file = open_file(location, None)
    _, shape, _ = header(file)
    seq_len = max(1, shape[-1] - 1) if shape else 1  # a table without targets is refused by its shape
    samples = FileSamples(file, seq_len=seq_len, vocab_size=vocab_size)
    with closing(open_backend(choose("auto")[0])) as backend:
        teach_on(backend, model, samples, out, k)


def teach_on(backend: Backend, model: Trained, samples: FileSamples, out: Path, k: int) -> None:
    """Write the teacher file on an open backend, whose ranks share the model by tensor parallelism; see `teach`."""
    mesh = Mesh.build(backend.world, backend.rank, tp=backend.world)
    backend.lay_out(mesh)
    lm = model.open(backend, samples.seq_len, mesh)
    shape = (samples.num_rows, 2 * k * samples.seq_len)
    kept = replacing(out) if backend.rank == 0 else nullcontext()
    console = standard_error(quiet=backend.rank > 0)
    units = 0
    with kept as draft, Progress(f"{model.location} reads rows", samples.num_rows, console=console) as progress:
        if draft is not None:
            description: dict[str, Any] = {"descr": "<i4", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(draft, description)
        for row in range(samples.num_rows):
            ids = samples.rows(np.array([row]))[:, :-1]
            with torch.no_grad():
                likeliest = _top_tokens(lm.logits(backend.put(torch.from_numpy(ids.copy())))[0], k)
            if likeliest.min() < 0:  # on every rank, since all have the same logits
                reason = f"the teacher's logits are not finite in row {row} of {samples.name}"
                raise DivergedError(f"{reason}: its weights diverged; use an earlier checkpoint")
            if draft is not None:
                draft.write(likeliest.tobytes())
            progress.show(row + 1)
            units += int(likeliest[k:].sum(dtype=np.int64))
    targets = samples.num_rows * samples.seq_len
    share = units / PROBABILITY_UNITS / targets
    console.print(
        f"{out}: {k} tokens for each of {targets:,} targets, with {share:.1%} of the teacher's probability on average; "
        f"train with data.source=tokens data.path={samples.name} data.teacher={out} data.teacher_k={k}"
    )


def _top_tokens(logits: Tensor, k: int) -> NDArray[np.int32]:
    """Token ids and probabilities of one row of the teacher file: logits (S, V) to (2K, S).

    Probabilities are in units of 2^-24. They are -1 where logits are not finite.
    """
    top, ids = logits.float().topk(k, dim=-1)
    probabilities = (top - logits.float().logsumexp(-1, keepdim=True)).exp()
    units = (probabilities * PROBABILITY_UNITS).round().nan_to_num(nan=-1.0).to(torch.int32)
    both = torch.cat([ids.to(torch.int32), units], dim=-1).t().contiguous()
    result: NDArray[np.int32] = both.cpu().numpy().astype("<i4")
    return result
