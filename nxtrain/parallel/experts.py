"""Mixture-of-experts layer: each expert is sharded over tp, and expert parallelism divides the experts between ranks.

Shapes: S sequence, B batch, D hidden size, k experts of a token; S/tp under sequence parallelism, else S.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from nxtrain.common.dimensions import MoeShape
from nxtrain.common.sharding import Init, ShardSpec
from nxtrain.parallel.dispatch import capacity_of, dispatch, num_dropped, static_dispatch
from nxtrain.parallel.expert_parallel import ExpertParallel
from nxtrain.parallel.expert_products import ClampedUnit, ExpertMatrices, LowRank
from nxtrain.parallel.regions import TensorParallel


class _Matrices(nn.Module):
    """One weight matrix of every expert of this rank, fused into one parameter, with optional biases as another."""

    def __init__(self, spec: ShardSpec, init: Init, tp: TensorParallel, bias: ShardSpec | None) -> None:
        super().__init__()
        spec = replace(spec, init=init)
        self.specs = {"weight": spec}
        self.weight = tp.empty(spec)
        self.bias: nn.Parameter | None = None
        if bias is not None:
            self.specs["bias"] = bias
            self.bias = tp.empty(bias)


class Experts(nn.Module):
    """Gated feed-forward experts of a block; each token passes through k of them.

    Args:
        hidden_size: D.
        mixture: Number and width of the experts.
        init, init_out: Initial values of the input and output projections.
        tp: Tensor parallel context.
        capacity_factor: Slots (token-expert pairs) that an expert computes, relative to an even load; None for no
            limit.
        expert_parallel: Ranks that divide the experts; None if this rank has all experts.

    Attributes:
        num_own: Experts of this rank.
        updates: Function that returns the low-rank updates of the input and the output projections.
    """

    updates: Callable[[], tuple[LowRank | None, LowRank | None]] | None = None

    def __init__(  # 8 arguments: as `LayerSet.experts`, with the ranks
        self,
        hidden_size: int,
        mixture: MoeShape,
        init: Init,
        init_out: Init,
        tp: TensorParallel,
        *,
        capacity_factor: float | None = None,
        expert_parallel: ExpertParallel | None = None,
    ) -> None:
        super().__init__()
        own = range(mixture.num_experts)
        if expert_parallel is not None:
            own = expert_parallel.own(mixture.num_experts)
        specs = mixture.specs(hidden_size, own)
        of_gate_up, of_down = (specs.get(f"experts.{name}.bias") for name in ("gate_up_proj", "down_proj"))
        self.gate_up_proj = _Matrices(specs["experts.gate_up_proj.weight"], init, tp, of_gate_up)
        self.down_proj = _Matrices(specs["experts.down_proj.weight"], init_out, tp, of_down)
        self._unit: ClampedUnit | None = None
        if mixture.limit is not None:
            self._unit = ClampedUnit(mixture.limit, mixture.alpha)
        self._num_experts = mixture.num_experts
        self._tp = tp
        self._capacity_factor = capacity_factor
        self.num_own, self._expert_parallel = len(own), expert_parallel

    def forward(self, x: Tensor, weights: Tensor, indices: Tensor) -> tuple[Tensor, Tensor | None]:
        """Weighted sum of expert outputs, and the number of slots dropped beyond the capacity.

        Args:
            x: (S/tp, B, D) activations.
            weights: (S/tp, B, k) float32, the router's weights.
            indices: (S/tp, B, k) integers, experts of each token.

        Returns:
            (S/tp, B, D), and the number of dropped slots (token-expert pairs), () float32, or None without a capacity.
            Under sequence parallelism each rank returns an equal part of the number.
        """
        tp = self._tp
        x, weights = tp.enter(x), tp.enter(weights)
        if tp.sequence_parallel:
            indices = tp.comm.all_gather(indices, tp.axis)
        capacity, dropped = None, None
        if self._capacity_factor is not None:
            capacity = capacity_of(indices.numel(), self._num_experts, self._capacity_factor)
            dropped = num_dropped(indices, self._num_experts, capacity)
            if tp.sequence_parallel:
                dropped = dropped / tp.axis.size
        tokens = (x.flatten(0, 1), weights.flatten(0, 1), indices.flatten(0, 1))
        updates = (None, None) if self.updates is None else self.updates()
        biases: tuple[Tensor, Tensor] | None = None
        if self.gate_up_proj.bias is not None and self.down_proj.bias is not None:
            # Each tp rank adds an equal part of the bias, since the outputs are summed over tp.
            biases = self.gate_up_proj.bias, self.down_proj.bias / tp.axis.size
        matrices = ExpertMatrices(
            self.gate_up_proj.weight, self.down_proj.weight, self.num_own, *updates, biases=biases, unit=self._unit
        )
        is_static = tp.comm.lazy or tp.kernels.static_shapes or torch.compiler.is_compiling()
        if capacity is not None and not tp.kernels.host_reads_are_free:
            # Blocks as large as the capacity, since otherwise the host would wait for the numbers of rows.
            grouping = tp.kernels.grouping(x.dtype, matrices.sizes)
            is_static = is_static or grouping.counted or self._expert_parallel is not None
        if is_static:
            kernel = tp.kernels.blockwise
            out = static_dispatch(*tokens, matrices, self._num_experts, capacity, self._expert_parallel, kernel)
        else:
            out = dispatch(*tokens, matrices, self._num_experts, tp.kernels, capacity, self._expert_parallel)
        return tp.exit(out.unflatten(0, x.shape[:2])), dropped
