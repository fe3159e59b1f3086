"""A lost rank on a pretended GPU: the device waits until the groups are aborted, and new groups serve the process."""

from __future__ import annotations

import threading

import torch

from nxtrain.common.errors import LostPeerError
from nxtrain.common.mesh import Mesh
from tests.support.cuda_sim import Record, SimulatedGpu, lose_rank, mark, opened_gpu, recorded


def lose_and_meet_again() -> tuple[Record, str, str]:
    """Record of a loss and of the next start, the error of the read, and that of the run."""
    from torch.distributed import HashStore

    mesh = Mesh.build(4, 0, tp=2)
    with recorded() as record:
        with opened_gpu(0, 4, HashStore()) as backend:
            backend.lay_out(mesh)
            for axis in (mesh.tp, mesh.dp):
                backend.collectives.all_reduce(torch.ones(2, device=backend.device), axis)
            number = torch.ones((), device=backend.device)
            lose_rank()
            telling = threading.Timer(0.3, backend.abandon, ["lost ranks: 1"])
            telling.start()
            try:
                backend.fetch({"number": number})
            except LostPeerError as error:
                lost = str(error)
            telling.join()
            failed = str(backend.failed(RuntimeError("a group is gone")))
        mark("again")
        with opened_gpu(0, 4, HashStore()) as backend:
            backend.lay_out(mesh)
            backend.collectives.all_reduce(torch.ones(2, device=backend.device), mesh.tp)
            assert backend.fetch({"number": number}).keys() == {"number"}
    return record, lost, failed


def test_a_device_that_waits_for_a_lost_rank_goes_on_with_new_groups(gpu: SimulatedGpu) -> None:
    record, lost, failed = gpu.run(lose_and_meet_again)
    assert lost == "lost ranks: 1"
    assert failed.startswith("lost ranks: 1")
    again = record.after("again")
    opened = [event.fields["comm"] for event in record.of("open")]
    opened_again = [event.fields["comm"] for event in again.of("open")]
    aborted = [event.fields["comm"] for event in record.of("abort")]
    assert sorted(aborted) == sorted(opened[: len(opened) - len(opened_again)])
    assert len(aborted) >= 2, "those of tp and dp"
    assert {event.fields["comm"] for event in again.of("nccl")} <= {*opened_again}
    assert again.of("nccl")
