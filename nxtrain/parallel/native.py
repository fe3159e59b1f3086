"""Layer set of nxtrain's own sharded layers on plain collectives, for CPU, CUDA and PyTorch/XLA."""

from __future__ import annotations

from nxtrain.common.dimensions import MoeShape
from nxtrain.common.layers import LayerSet
from nxtrain.common.sharding import Init, Segment
from nxtrain.parallel.embedding import VocabEmbedding
from nxtrain.parallel.expert_parallel import ExpertParallel
from nxtrain.parallel.experts import Experts
from nxtrain.parallel.linear import ColumnLinear, RowLinear
from nxtrain.parallel.loss import VocabHead
from nxtrain.parallel.regions import TensorParallel


class NativeLayers(LayerSet):
    """Megatron-style sharded layers: column and row linear layers, embedding, experts and output projection.

    Args:
        parallel: Tensor parallel context of the layers.
        loss_chunk_bytes: Most bytes of float32 logits that exist at once.
        token_losses: The output projection returns each token's loss in place of the sum.
        expert_parallel: Ranks that divide the experts; None if each rank has all experts.
    """

    def __init__(
        self,
        parallel: TensorParallel,
        *,
        loss_chunk_bytes: int = 64 << 20,
        token_losses: bool = False,
        expert_parallel: ExpertParallel | None = None,
    ) -> None:
        self.tp, self.sequence_parallel = parallel.axis, parallel.sequence_parallel
        self._parallel = parallel
        self._loss_chunk_bytes = loss_chunk_bytes
        self._token_losses = token_losses
        self._expert_parallel = expert_parallel

    def column(
        self, in_features: int, segments: tuple[Segment, ...], init: Init, *, bias: bool = False
    ) -> ColumnLinear:
        return ColumnLinear(in_features, segments, init, self._parallel, bias=bias)

    def row(self, in_features: int, out_features: int, init: Init, *, bias: bool = False) -> RowLinear:
        return RowLinear(in_features, out_features, init, self._parallel, bias=bias)

    def embedding(self, vocab_size: int, hidden_size: int, init: Init) -> VocabEmbedding:
        return VocabEmbedding(vocab_size, hidden_size, init, self._parallel)

    def experts(
        self, hidden_size: int, mixture: MoeShape, init: Init, init_out: Init, *, capacity_factor: float | None
    ) -> Experts:
        return Experts(
            hidden_size,
            mixture,
            init,
            init_out,
            self._parallel,
            capacity_factor=capacity_factor,
            expert_parallel=self._expert_parallel,
        )

    def head(self, vocab_size: int, hidden_size: int, init: Init) -> VocabHead:
        return VocabHead(
            vocab_size,
            hidden_size,
            init,
            self._parallel,
            chunk_bytes=self._loss_chunk_bytes,
            token_losses=self._token_losses,
        )
