"""NeuronX Distributed's parallel layers, with the parameter names and shards of nxtrain's native layers.

Names, local shapes and `ShardSpec`s equal the native layers', so both layer sets load each other's weights. NxD's code
does the computation. Settings that NxD computes wrong are not used. NxD skips the all-reduce of a column layer's input
gradient if `reduce_dtype` is not the type of the activations. NxD's embedding supports float32 and bfloat16 only, and
reduces sequence dimension 0 only.

Shapes: S sequence, B batch, I inputs, O outputs; S/tp under sequence parallelism, else S.
"""

from __future__ import annotations

import torch
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from torch import Tensor, nn

from nxtrain.common.dimensions import MoeShape
from nxtrain.common.errors import BackendError
from nxtrain.common.layers import Head, LayerSet
from nxtrain.common.mesh import Axis
from nxtrain.common.sharding import Init, Segment, ShardSpec

DTYPES = (torch.float32, torch.bfloat16)
"""Types that NxD's embedding supports; other types become bfloat16."""


class NxdLayers(LayerSet):
    """Layer set with NxD's column, row and embedding layers; NxD's process groups must exist.

    Args:
        native: nxtrain's own layers, which build the experts and the output head. NxD's cross entropy is not used,
            since it counts ignored targets and overwrites the logits.
        dtype: Type of the weights.

    Raises:
        BackendError: NxD's embedding does not support the type.
    """

    def __init__(self, native: LayerSet, dtype: torch.dtype) -> None:
        if dtype not in DTYPES:
            raise BackendError(
                f"NeuronX Distributed's embedding would convert {dtype} to torch.bfloat16; use precision.params=fp32 "
                "or bf16, or backend.layers=native"
            )
        self.tp, self.sequence_parallel = native.tp, native.sequence_parallel
        self._native, self._dtype = native, dtype

    def column(self, in_features: int, segments: tuple[Segment, ...], init: Init, *, bias: bool = False) -> nn.Module:
        spec = ShardSpec.column(in_features, segments, init)
        return NxdColumn(spec, self.tp, self._dtype, self.sequence_parallel, bias=bias)

    def row(self, in_features: int, out_features: int, init: Init, *, bias: bool = False) -> nn.Module:
        assert not bias, "models with such biases take our own layers"
        spec = ShardSpec.row(in_features, out_features, init)
        return NxdRow(spec, self.tp, self._dtype, self.sequence_parallel)

    def embedding(self, vocab_size: int, hidden_size: int, init: Init) -> nn.Module:
        spec = ShardSpec.vocab(vocab_size, hidden_size, init)
        return NxdEmbedding(spec, self.tp, self._dtype, self.sequence_parallel)

    def experts(
        self, hidden_size: int, mixture: MoeShape, init: Init, init_out: Init, *, capacity_factor: float | None
    ) -> nn.Module:
        return self._native.experts(hidden_size, mixture, init, init_out, capacity_factor=capacity_factor)

    def head(self, vocab_size: int, hidden_size: int, init: Init) -> Head:
        return self._native.head(vocab_size, hidden_size, init)


class NxdColumn(ColumnParallelLinear):  # type: ignore[misc]
    """NxD column parallel linear layer: outputs sharded over tp, and one fused matrix for several segments.

    Args:
        spec: Sharding of the weight.
        tp: Tensor parallel axis.
        dtype: Type of the weight and of all-reduces.
        sequence_parallel: The input is sharded along the sequence.
        bias: The layer has a bias.
    """

    def __init__(self, spec: ShardSpec, tp: Axis, dtype: torch.dtype, sequence_parallel: bool, *, bias: bool) -> None:
        local_out, in_features = spec.local_shape(tp)
        super().__init__(
            input_size=in_features,
            output_size=local_out * tp.size,
            bias=bias,
            gather_output=False,
            dtype=dtype,
            sequence_parallel_enabled=sequence_parallel,
            sequence_dimension=0 if sequence_parallel else None,
            reduce_dtype=dtype,
        )
        self.specs = {"weight": spec, "bias": spec.of_bias()} if bias else {"weight": spec}
        self.split_sizes = tuple(piece.local_length for piece in spec.pieces(tp))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply (S/tp, B, I) by the weight: (S, B, O/tp), with segments of widths `split_sizes` side by side."""
        return _contiguous_gradient(super().forward(x.contiguous()))


class NxdRow(RowParallelLinear):  # type: ignore[misc]
    """NxD row parallel linear layer: inputs sharded over tp, outputs summed over tp.

    Args:
        spec: Sharding of the weight.
        tp: Tensor parallel axis.
        dtype: Type of the weight and of all-reduces.
        sequence_parallel: The output is sharded along the sequence.
    """

    def __init__(self, spec: ShardSpec, tp: Axis, dtype: torch.dtype, sequence_parallel: bool) -> None:
        out_features, local_in = spec.local_shape(tp)
        super().__init__(
            input_size=local_in * tp.size,
            output_size=out_features,
            bias=False,
            input_is_parallel=True,
            dtype=dtype,
            sequence_parallel_enabled=sequence_parallel,
            sequence_dimension=0 if sequence_parallel else None,
            reduce_dtype=dtype,
        )
        self.specs = {"weight": spec}

    def forward(self, x: Tensor) -> Tensor:
        """Multiply (S, B, I/tp) by the weight: (S/tp, B, O)."""
        return _contiguous_gradient(super().forward(x.contiguous()))


class NxdEmbedding(ParallelEmbedding):  # type: ignore[misc]
    """NxD vocabulary embedding with rows sharded over tp; padding rows past the vocabulary are zero.

    Args:
        spec: Sharding of the weight.
        tp: Tensor parallel axis.
        dtype: Type of the weight and of the all-reduce.
        sequence_parallel: The output is sharded along the sequence.
    """

    def __init__(self, spec: ShardSpec, tp: Axis, dtype: torch.dtype, sequence_parallel: bool) -> None:
        local_rows, hidden_size = spec.local_shape(tp)
        super().__init__(
            num_embeddings=local_rows * tp.size,
            embedding_dim=hidden_size,
            dtype=dtype,
            sequence_parallel_enabled=sequence_parallel,
        )
        self.specs = {"weight": spec}
        self.rank_util = _RankOnDevice(tp.rank)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed token ids (S, B) as (S/tp, B, D)."""
        # Under sequence parallelism, NxD's embedding takes the batch first, and returns it second.
        return _contiguous_gradient(super().forward(tokens.t() if self.sequence_parallel_enabled else tokens))


class _RankOnDevice(nn.Module):
    """Tensor parallel rank of an embedding as a device tensor, so that all ranks record the same graph.

    Args:
        rank: Tensor parallel rank of this process.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank
        self.rank: Tensor
        self.register_buffer("rank", torch.empty(2, dtype=torch.int64), persistent=False)

    def host_buffers(self) -> dict[str, Tensor]:
        """Values of the module's buffers, computed on the host."""
        return {"rank": torch.tensor([self._rank, -1])}  # torch-xla folds a tensor of a single number into a constant

    def get_rank(self) -> Tensor:
        """Return the tensor parallel rank as a () int64 tensor."""
        return self.rank[0]


def _contiguous_gradient(x: Tensor) -> Tensor:
    """Return `x` with a hook that makes its gradient contiguous, since NxD reshapes gradients by views."""
    if x.requires_grad:
        x.register_hook(Tensor.contiguous)
    return x
