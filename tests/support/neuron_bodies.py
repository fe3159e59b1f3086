"""Work of the XLA lane's devices as a pretended Trainium machine's; imported by name in their process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.backends.neuron.backend import NeuronBackend, NeuronKernels
from nxtrain.config.check import Resolved
from tests.support.neuron_machine import REPLACED
from tests.support.parity import Course, run_ours
from tests.support.replaced import replaced


def courses(backend: Backend, cases: Sequence[tuple[Resolved, Mapping[str, Tensor]]], steps: int) -> list[Course]:
    """Train each case from its weights, with the classes that a Trainium gets and nothing else."""
    assert type(backend) is NeuronBackend
    assert type(backend.kernels) is NeuronKernels
    found = [run_ours(backend, resolved, steps, weights) for resolved, weights in cases]
    if backend.rank == 0:  # for all threads of the process
        assert replaced("nxtrain.backends") == REPLACED
    return found
