"""What the processes of `xla_ranks` do; imported by name there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from nxtrain.backends import xla
from nxtrain.backends.base import Support
from nxtrain.backends.c10d import Placement
from nxtrain.backends.neuron import sdk
from nxtrain.backends.neuron.backend import NeuronBackend
from nxtrain.backends.xla_world import join
from nxtrain.checkpoint import layout
from nxtrain.checkpoint.load import load
from nxtrain.checkpoint.meta import Meta
from nxtrain.checkpoint.save import save
from nxtrain.config.check import Resolved
from nxtrain.errors import NxtrainError
from nxtrain.graphs import trace
from nxtrain.mesh import Mesh
from nxtrain.parallel.grads import Gradients
from nxtrain.sharding import Layout, ParamTable, Segment, ShardSpec
from nxtrain.train.trainer import Trainer
from tests.support.graph_mutants import MUTANTS


def outcomes(place: Placement, plan: Resolved, steps: int, mutants: Sequence[str]) -> list[list[str]]:
    """Train on paper with each defect: class and message of what ended it, and the graphs that were handed over."""
    found = []
    with patch.object(xla, "join", cache(join)):  # one process group for all cases
        for mutant in mutants:
            tape = trace._Tape(rank=place.rank)
            with {**MUTANTS, **RANK_MUTANTS}[mutant]():
                try:
                    trace._play(plan, place.world, tape, steps)
                    ended = ["", ""]
                except NxtrainError as error:
                    ended = [type(error).__name__, str(error)]
            found.append([*ended, *(cut.hash for cut in tape.cuts)])
    return found


def _uneven_batch() -> AbstractContextManager[Any]:
    sound = Trainer._put

    def put(self: Trainer, batch: Any) -> Any:
        whole = sound(self, batch)
        short = slice(1 if self.state.mesh.rank else None)
        return type(whole)([x[short] for x in whole.inputs], [x[short] for x in whole.targets])

    return patch.object(Trainer, "_put", put)


def _work_of_one_rank() -> AbstractContextManager[Any]:
    sound = Trainer._health

    def health(self: Trainer, lr: float) -> dict[str, Tensor]:
        if self.state.mesh.rank == 1:
            self.state.backend.step_boundary()
        return sound(self, lr)

    return patch.object(Trainer, "_health", health)


def _after_warm_up() -> AbstractContextManager[Any]:
    sound, calls = Gradients.norm, []

    def norm(self: Gradients, tensors: Mapping[str, Tensor]) -> Tensor:
        calls.append(0)
        late = self._layout.mesh.rank and len(calls) > 4  # each step asks twice: for the update and for the log
        return sound(self, tensors) + (2.0 if late else 0.0)

    return patch.object(Gradients, "norm", norm)


RANK_MUTANTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "uneven batch": _uneven_batch,
    "work of one rank": _work_of_one_rank,
    "after warm-up": _after_warm_up,
}


def on_a_fake_neuron_machine(place: Placement, folder: str) -> dict[str, Any]:
    """Open and close the Neuron backend, and use what it gives beside graphs.

    The fake is the machine: it says that it has devices and the SDK, and PJRT's device is a CPU.
    """
    import torch_xla
    from torch_xla.distributed.xla_backend import ProcessGroupXla

    with patch.object(sdk, "support", lambda: Support(True, "a fake")):
        backend = NeuronBackend(hang_timeout_s=60.0)
    found: dict[str, Any] = {
        "placement": [backend.rank, backend.world, backend.local_rank, backend.local_world],
        "default group": [dist.get_backend(), dist.get_rank(), dist.get_world_size()],
        "is of torch-xla": isinstance(dist.group.WORLD, ProcessGroupXla),
        "devices that replicate": torch_xla._XLAC._xla_get_replication_devices_count(),
        "host group": dist.get_backend(backend.host_group),
    }
    groups = [[0], [1]]
    made = dist.new_group([place.rank], pg_options={"xla_pg_options": {"mesh": groups}})
    found["group of NxD"] = getattr(made, "_mesh", None)
    backend.collectives.barrier()
    found["loaded"] = _saved_and_loaded(backend, Path(folder))
    found["compiled"] = backend.num_compiled()
    backend.close()
    found["closed"] = not dist.is_initialized()
    return found


def _saved_and_loaded(backend: NeuronBackend, folder: Path) -> list[float]:
    """This rank's half of a vector that both save and load again."""
    table = ParamTable({"w": ShardSpec((4,), dim=0, segments=(Segment("w", 4),))})
    cut = Layout(table, Mesh.build(backend.world, backend.rank, tp=2))
    meta = Meta(
        step=1,
        samples=1,
        tokens=1,
        seed=0,
        family="none",
        config={},
        dtype="fp32",
        state_dtype="fp32",
        data_fingerprint="",
    )
    path = layout.step_path(folder, 1)
    mine = torch.arange(2.0) + 2 * backend.rank
    save(path, {"model": {"w": mine}}, cut, meta, process_group=backend.host_group)
    read = torch.zeros(2)
    load(path, {"model": {"w": read}}, cut, process_group=backend.host_group)
    found: list[float] = read.tolist()
    return found
