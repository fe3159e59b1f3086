"""Rules of expert parallelism: division of the experts and of their copies, and the features that it excludes."""

from __future__ import annotations

from collections.abc import Iterator

from nxtrain.common.errors import Problem
from nxtrain.common.mesh import divisors, listed
from nxtrain.config.schema import RunConfig


def experts(config: RunConfig, num_experts: int) -> Iterator[Problem]:
    """Problems of the division of a model's experts over ranks.

    Args:
        num_experts: Experts of each feed-forward of the model; 0: the model has none.
    """
    parallel = config.parallel
    ep = parallel.ep
    if ep == 1:
        return
    if not num_experts:
        reason = f"{ep} ranks are to divide experts, and the model has none"
        yield Problem("parallel.ep", reason, hint="use parallel.ep=1, or a family with experts")
    elif num_experts % ep:
        reason = f"{ep} does not divide the model's {num_experts} experts"
        yield Problem("parallel.ep", reason, hint=f"use one of {listed(divisors(num_experts))}")
    copies = parallel.dp * parallel.cp
    if copies % ep:
        reason = f"{ep} does not divide dp x cp={copies}, the ranks that experts are divided between"
        yield Problem("parallel.ep", reason, hint=f"use one of {listed(divisors(copies))}, or another parallel.dp")
    if parallel.shard_size > 1 and parallel.shard_size % ep:
        reason = f"ep={ep} does not divide the {parallel.shard_size} ranks that share state"
        hint = f"use a multiple of {ep}, or parallel.ep among {listed(divisors(parallel.shard_size))}"
        yield Problem("parallel.shard_size", reason, hint=hint)
    if config.backend.layers == "nxd":
        reason = f"ep={ep} divides experts of our own, and backend.layers=nxd has other layers"
        yield Problem("backend.layers", reason, hint="use auto or native")
    if config.compile.torch_compile:
        reason = f"ep={ep} exchanges tokens inside of the blocks, which torch.compile does not take"
        yield Problem("compile.torch_compile", reason, hint="use false, or parallel.ep=1")
