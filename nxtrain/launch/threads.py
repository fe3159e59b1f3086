"""OpenMP threads of a rank: their number depends on the model's operations, and waiting threads sleep."""

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
"""Floating point operations of a block's forward pass for which one more thread pays off.

A block has four matrix products. With this number each product takes a thread about 0.5 ms, at the 70 Gflop/s of an AMD
EPYC core in float32. Waking a thread and waiting for the thread took 0.03 to 0.06 ms per product.
"""

READ_TOKENS = 8
"""Number of tokens whose matrix products take as long as reading the weights from memory.

An AMD EPYC core reads 20 GB/s, and computes 70 Gflop/s in float32. The products of one token with matrices outside of
the cache took the time of 7.2 tokens.
"""

_OPENMP = "https://www.openmp.org/spec-html/5.2/openmpse61.html"


def thread_variables(
    config: RunConfig, environ: Mapping[str, str], num_ranks: int, *, neuron: bool = False
) -> tuple[Variable, ...]:
    """OpenMP environment variables for a training rank, without the variables that the shell has set.

    Args:
        config: Configuration of the run.
        environ: Environment variables of the shell.
        num_ranks: Ranks of this machine.
        neuron: The run uses Neuron devices, on whose hosts no wait policy was measured; the policy is not set.
    """
    busy = 1
    with suppress(ConfigError):  # the check of the configuration reports the error
        costs = family_of(config).dimensions(resolve_model(config)).layer_costs(config.train.seq_len)
        tokens = config.train.micro_batch * config.train.seq_len // config.parallel.cp
        busy = max(1, costs.block * tokens // (config.parallel.tp * BLOCK_OPS_PER_THREAD))
    return _variables(busy, environ, num_ranks, neuron=neuron)


def inference_variables(
    shape: tuple[ModelFamily, ModelConfig] | None, tokens: int, environ: Mapping[str, str], num_ranks: int
) -> tuple[Variable, ...]:
    """OpenMP environment variables for a rank that generates or evaluates; see `thread_variables`.

    Args:
        shape: Family and configuration of the model; None if unknown: a rank then uses its share of the cores.
        tokens: Tokens that a rank computes in one forward pass.
        environ: Environment variables of the shell.
        num_ranks: Ranks of this machine.
    """
    busy = num_cores()
    if shape is not None:
        family, model = shape
        operations = family.dimensions(model).layer_costs(1).block * max(tokens, READ_TOKENS)
        busy = max(1, operations // BLOCK_OPS_PER_THREAD)
    return _variables(busy, environ, num_ranks)


def num_cores() -> int:
    """Number of cores that this process may use; a cluster may grant only some cores of the machine."""
    if hasattr(os, "sched_getaffinity"):  # macOS lacks it
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _variables(busy: int, environ: Mapping[str, str], num_ranks: int, *, neuron: bool = False) -> tuple[Variable, ...]:
    """OpenMP environment variables for at most `busy` threads, without the variables that the shell has set."""
    variables: list[Variable] = []
    threads = environ.get(THREADS, "")
    if not threads:
        share = max(1, num_cores() // num_ranks)
        reason = "ranks that each use all cores slow each other down many times"
        if busy < share:
            reason = f"a block of this model keeps no more threads busy, and the rank's share is {share}"
        threads = str(min(busy, share))
        variables.append(Variable(THREADS, threads, reason))
    if threads != "1" and not neuron and WAITING not in environ and "GOMP_SPINCOUNT" not in environ:
        reason = "waiting threads sleep; otherwise they take cores from threads with work"
        variables.append(Variable(WAITING, "passive", reason, _OPENMP))
    return tuple(variables)
