"""XLA devices meet what NeuronX Distributed's own Llama went through."""

from __future__ import annotations

from pathlib import Path

import torch

from nxtrain.backends.base import Backend
from nxtrain.config.check import Resolved
from nxtrain.train.step import train_step
from tests.support.nxd_golden import (
    CASES,
    GLOBAL_BATCH,
    OPTIM,
    Course,
    Distance,
    bound,
    our_plan,
    recorded,
    token_rows,
    weights,
)
from tests.support.parity import local_batch, start
from tests.support.xla_engine import run_devices

MET = ("tp2_sp", "dp2_zero1")


def courses(backend: Backend, plans: list[Resolved]) -> list[Course]:
    """Train each; the loop of a whole run has barriers outside its graphs, which threads cannot meet at."""
    found = []
    for plan in plans:
        state = start(backend, plan, weights())
        losses, grad_norms = [], []
        for batch in torch.from_numpy(token_rows().astype("int64")).split(GLOBAL_BATCH):
            result = train_step(state, local_batch(state, batch, plan.config.train.micro_batch), OPTIM["lr"])
            read = backend.fetch({"loss": result.loss, "grad_norm": result.grad_norm})
            losses.append(read["loss"])
            grad_norms.append(read["grad_norm"])
        found.append(Course(losses, grad_norms))
    return found


def test_we_meet_nxd_on_xla(tmp_path: Path) -> None:
    plans = [our_plan(CASES[name], tmp_path, Path()) for name in MET]
    for found in run_devices(2, courses, plans, folder=tmp_path):
        for name, course in zip(MET, found, strict=True):
            distance = Distance.between(course, recorded()[name])
            assert distance.within(bound(CASES[name], recorded())), (name, distance)
