"""Loops inside an XLA graph: a `While` with a static number of iterations, and slices at dynamic offsets.

A Python loop adds its operations to the graph once per iteration, but a `While` contains them once. The counter and the
offsets are sums of constants, as in JAX loops. AWS's compiler supports such loops with a static number of iterations.

Source: `scan` in torch_xla/experimental/scan.py of torch-xla 2.9, for the recording of the loop body; AWS's page
frameworks/jax/setup/jax-neuronx-known-issues.rst in https://github.com/aws-neuron/aws-neuron-sdk at 81ce03a, for loops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Offset:
    """Integer of a loop that grows by a constant step per iteration.

    Args:
        first: Value in the first iteration.
        step: Increment per iteration.
    """

    first: int
    step: int


def repeat(
    rounds: int,
    body: Callable[..., Sequence[Tensor]],
    offsets: Sequence[Offset],
    fixed: Sequence[Tensor],
    state: Sequence[Tensor],
) -> list[Tensor]:
    """Run a function repeatedly as one `While` loop of the graph, and return the last state.

    Args:
        rounds: Number of iterations.
        body: Function of the offsets, the fixed tensors and the state; returns the next state.
        offsets: Integers that `body` takes as () int32 tensors.
        fixed: Tensors that `body` takes in each iteration. Tensors of its closure would be recomputed each time.
        state: Initial state.
    """
    import torch_xla
    import torch_xla.core.xla_builder as xb

    scalars = [xb.create_placeholder_tensor((), torch.int32) for _ in offsets]
    blanks = [xb.create_placeholder_tensor(x.shape, x.dtype) for x in (*fixed, *state)]
    results = list(body(*scalars, *blanks))
    recorded = torch_xla._XLAC.lowering.LoweringContext("Round")
    recorded.build(results)
    a_round = xb.computation_from_module_proto("round", recorded.hlo())

    # Python numbers in the body become device tensors, which are inputs of each iteration too.
    numbers = dict(recorded.device_parameter_id_tensor_mapping())
    sources: dict[int, int] = {}
    for position, blank in enumerate((*scalars, *blanks)):
        parameter = recorded.tensor_parameter_id(blank)
        if parameter != -1:
            sources[parameter] = position
            numbers.pop(parameter, None)
    given = [*fixed, *state]
    for parameter, number in numbers.items():
        sources[parameter] = len(scalars) + len(given)
        given.append(number)

    def next_round(count: Any, *carried: Any) -> tuple[Any, ...]:
        builder = count.builder()
        at = [_constant(builder, x.first) + count * _constant(builder, x.step) for x in offsets]
        inputs = [*at, *carried]
        found = xb.Op.call(a_round, [inputs[sources[parameter]] for parameter in range(len(sources))])
        changed = [found.get_tuple_element(i) for i in range(len(state))]
        end = len(fixed) + len(state)
        return (count + _constant(builder, 1), *carried[: len(fixed)], *changed, *carried[end:])

    def loop(*inputs: Any) -> Any:
        builder = inputs[0].builder()
        start = _constant(builder, 0)
        return xb.Op.mkwhile([start, *inputs], lambda count, *_: count < _constant(count.builder(), rounds), next_round)

    computation = xb.create_computation("loop", loop, xb.tensor_shape(given))
    _, *carried = torch_xla._XLAC._xla_user_computation("xla::nxtrain_loop", given, computation)
    return list(carried[len(fixed) : len(fixed) + len(state)])


def _constant(builder: Any, value: int) -> Any:
    import torch_xla.core.xla_builder as xb

    return xb.Op.scalar(builder, value, dtype=xb.Type.S32)


def sliced(x: Tensor, dim: int, start: Tensor, size: int) -> Tensor:
    """Slice a dimension at a device offset, () int32, which is clamped so that the slice lies within the tensor."""
    out: Tensor = _slices()[0](x, start, dim=dim, size=size)
    return out


def updated(x: Tensor, dim: int, start: Tensor, part: Tensor) -> Tensor:
    """Return a copy of a tensor in which `part` replaces the entries that `sliced` would return."""
    out: Tensor = _slices()[1](x, part, start, dim=dim)
    return out


@lru_cache(maxsize=1)
def _slices() -> tuple[Any, Any]:
    """XLA operations that read and write slices at device offsets; torch-xla's own slices have constant offsets."""
    import torch_xla.core.xla_op_registry as registry

    def offsets(x: Any, start: Any, dim: int) -> list[Any]:
        starts = [start.zeros_like()] * x.shape().rank
        starts[dim] = start
        return starts

    def slice_of(x: Any, start: Any, dim: int, size: int) -> Any:
        sizes = list(x.shape().sizes)
        sizes[dim] = size
        return x.dynamic_slice(offsets(x, start, dim), sizes)

    def update_of(x: Any, part: Any, start: Any, dim: int) -> Any:
        return x.dynamic_update_slice(part, offsets(x, start, dim))

    return registry.register("nxtrain_slice", slice_of), registry.register("nxtrain_update", update_of)
