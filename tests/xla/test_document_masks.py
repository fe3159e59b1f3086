"""Documents that share a row compute on an XLA device what each computes there alone, and on the CPU."""

from __future__ import annotations

from pathlib import Path
from random import Random

import torch

from nxtrain.backends.cpu import CpuBackend
from nxtrain.common.mesh import Mesh
from tests.support.corpora import SEQ_LEN, drawn_batch, spans
from tests.support.models import our_model, plan, weights_of
from tests.support.xla_bodies import document_logits
from tests.support.xla_engine import run_devices

TOLERANCE = 1e-5
SHAPES = ("mha", "gqa2", "llama3-rope")


def test_packed_documents_are_those_alone(tmp_path: Path) -> None:
    jobs, drawn = [], []
    for number, shape in enumerate(SHAPES):
        resolved = plan(shape, train={"seq_len": SEQ_LEN})
        rows, batch = drawn_batch(Random(number), 128, 3)
        assert batch.starts is not None
        inputs, starts = torch.from_numpy(batch.inputs[0]), torch.from_numpy(batch.starts[0])
        places = [(row, begin, end) for row, ids in enumerate(rows) for begin, end in spans(ids)]
        # One shape for all of them: what follows a document is masked by causality.
        alone = torch.zeros(len(places), SEQ_LEN, dtype=torch.int64)
        for document, (row, begin, end) in enumerate(places):
            alone[document, : end - begin] = inputs[row, begin:end]
        jobs.append((resolved, weights_of(resolved), inputs, starts, alone))
        drawn.append(places)
    (actual,) = run_devices(1, document_logits, jobs, folder=tmp_path)
    backend = CpuBackend()
    for (resolved, weights, inputs, _, _), places, (packed, unmasked, alone) in zip(jobs, drawn, actual, strict=True):
        model = our_model(resolved, backend, Mesh(1, 0), weights)
        assert len(places) > 6
        for document, (row, begin, end) in enumerate(places):
            ours, theirs = packed[row, begin:end], alone[document, : end - begin]
            torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)
            with torch.no_grad():
                on_cpu = model.logits(inputs[row : row + 1, begin:end])[0]  # type: ignore[operator]
            torch.testing.assert_close(ours, on_cpu, rtol=0, atol=TOLERANCE)
        assert float((packed - unmasked).abs().max()) > 100 * TOLERANCE, "without masks documents see each other"
    backend.close()
