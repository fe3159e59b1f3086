"""Threads of a rank on the host: their number follows the work of the model, and they sleep while they wait."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress

from nxtrain.common.errors import ConfigError
from nxtrain.common.family import ModelConfig, ModelFamily
from nxtrain.config.check import family_of, resolve_model
from nxtrain.config.schema import RunConfig
from nxtrain.launch.environment import Variable

THREADS = "OMP_NUM_THREADS"
WAITING = "OMP_WAIT_POLICY"

BLOCK_OPS_PER_THREAD = 128_000_000
"""Operations of a block's forward pass that are worth a thread.

A block has four products. With this number each takes a thread some 0.5 ms, at the 70 Gflop/s of a core of an AMD EPYC
in float32. To wake a thread and to wait for it took 0.03 to 0.06 ms there, for each product.
"""

READ_TOKENS = 8
"""Tokens whose products take as long as the read of the weights.

A core of an AMD EPYC reads 20 GB/s, and multiplies 70 Gflop/s in float32: the products of one token with matrices that
no cache holds took the time of 7.2 tokens.
"""

_OPENMP = "https://www.openmp.org/spec-html/5.2/openmpse61.html"


def thread_variables(
    config: RunConfig, environ: Mapping[str, str], num_ranks: int, *, neuron: bool = False
) -> tuple[Variable, ...]:
    """Variables of OpenMP that the shell of a rank lacks; a value of the shell is never changed.

    Args:
        neuron: The run uses Neuron devices, for whose hosts nobody has measured another way to wait.
    """
    busy = 1
    with suppress(ConfigError):  # the check of the configuration reports it
        costs = family_of(config).dimensions(resolve_model(config)).layer_costs(config.train.seq_len)
        tokens = config.train.micro_batch * config.train.seq_len // config.parallel.cp
        busy = max(1, costs.block * tokens // (config.parallel.tp * BLOCK_OPS_PER_THREAD))
    return _variables(busy, environ, num_ranks, neuron=neuron)


def inference_variables(
    shape: tuple[ModelFamily, ModelConfig] | None, tokens: int, environ: Mapping[str, str], num_ranks: int
) -> tuple[Variable, ...]:
    """Variables of OpenMP that a rank lacks when it generates or evaluates; see `thread_variables`.

    Args:
        shape: Family and shape of the model; None: unknown, and a rank takes its share of the cores.
        tokens: Tokens that a rank computes at once.
    """
    busy = num_cores()
    if shape is not None:
        family, model = shape
        operations = family.dimensions(model).layer_costs(1).block * max(tokens, READ_TOKENS)
        busy = max(1, operations // BLOCK_OPS_PER_THREAD)
    return _variables(busy, environ, num_ranks)


def num_cores() -> int:
    """Cores that this process may use, if known: a cluster often grants only some cores of the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _variables(busy: int, environ: Mapping[str, str], num_ranks: int, *, neuron: bool = False) -> tuple[Variable, ...]:
    """Variables for a number of threads that the work keeps busy; a value of the shell is never changed."""
    variables: list[Variable] = []
    threads = environ.get(THREADS, "")
    if not threads:
        share = max(1, num_cores() // num_ranks)
        reason = "ranks that each take all cores slow one another down many times over"
        if busy < share:
            reason = f"a block of this model keeps no more threads busy, and the rank's share is {share}"
        threads = str(min(busy, share))
        variables.append(Variable(THREADS, threads, reason))
    if threads != "1" and not neuron and WAITING not in environ and "GOMP_SPINCOUNT" not in environ:
        reason = "threads that wait sleep; else they take the cores from whoever has work"
        variables.append(Variable(WAITING, "passive", reason, _OPENMP))
    return tuple(variables)
