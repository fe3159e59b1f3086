"""Global batch on the device: this rank's rows and positions, divided into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from nxtrain.common.layers import ContextAttention
from nxtrain.common.mesh import Axis
from nxtrain.parallel.pipeline import MicroBatches
from nxtrain.train.preferences import Pairs


@dataclass(frozen=True)
class DeviceBatch:
    """This rank's part of a global batch, on the device.

    Args:
        inputs, targets: (B, S) int64 for each micro-batch, at this rank's positions; targets of `IGNORE_INDEX` do not
            count. With the tokens of a teacher, targets are (B, 2R, S).
        starts: (B, S) first position of each position's document, for each micro-batch; empty without document masks.
        pairs: Answers of each micro-batch; empty unless the objective compares answers.
        counted: (S/tp, B) float32 for each micro-batch, 1 for a token that the routers' losses count and 0 for padding;
            empty if all tokens count.
        swapped: The same rows with the answers of other prompts; None without labelled answers.
    """

    inputs: Sequence[Tensor]
    targets: Sequence[Tensor]
    starts: Sequence[Tensor] = ()
    pairs: Sequence[Pairs] = ()
    counted: Sequence[Tensor] = ()
    swapped: DeviceBatch | None = None

    @property
    def micro_batches(self) -> MicroBatches:
        """Arguments of `CausalLM.loss` for each micro-batch."""
        if self.counted:
            starts: Sequence[Tensor | None] = self.starts or [None] * len(self.counted)
            return list(zip(self.inputs, self.targets, starts, self.counted, strict=True))
        return list(zip(*filter(len, (self.inputs, self.targets, self.starts)), strict=True))

    @staticmethod
    def of(  # 8 arguments: tensors of whole sequences, and this rank's part of them
        inputs: Tensor,
        targets: Tensor,
        put: Callable[[Tensor], Tensor],
        starts: Tensor | None = None,
        context_parallel: ContextAttention | None = None,
        answers: Mapping[str, Tensor] | None = None,
        padding: Tensor | None = None,
        tokens_axis: Axis | None = None,
    ) -> DeviceBatch:
        """Upload host tensors of whole sequences, (num_micro, B, S), one micro-batch at a time.

        Slices of one device tensor would give each micro-batch a graph of its own on a lazy device. Targets were
        shifted in the whole sequences, so the division between ranks does not change them.

        Args:
            inputs, targets: Token ids of whole sequences.
            put: Copies a host tensor to the device.
            starts: First position of each position's document; None if a row is one document.
            context_parallel: Ranks that share the positions of each sequence; None if this rank has all positions.
            answers: Known fields of `Pairs`, by name; None without answers.
            padding: True at positions after the last document; None if the routers' losses count all positions.
            tokens_axis: Ranks that divide the tokens between layers; None if each rank has all tokens of its positions.
        """
        positions = None if context_parallel is None else context_parallel.positions

        def put_each(tensor: Tensor) -> list[Tensor]:
            if positions is not None:
                tensor = tensor.index_select(-1, positions)
            return [put(micro_batch.contiguous()) for micro_batch in tensor]

        pairs: list[Pairs] = []
        if answers is not None:
            columns = {}
            for name, values in answers.items():
                columns[name] = [put(x.contiguous()) for x in values]
            columns["numbers"] = put_each(answers["numbers"])
            pairs = [Pairs(**dict(zip(columns, values, strict=True))) for values in zip(*columns.values(), strict=True)]
        counted: list[Tensor] = []
        if padding is not None:
            own = padding if positions is None else padding.index_select(-1, positions)
            if tokens_axis is not None:
                own = own.chunk(tokens_axis.size, dim=-1)[tokens_axis.rank]
            counted = [put(micro_batch.t().logical_not().float().contiguous()) for micro_batch in own]
        of_documents = [] if starts is None else put_each(starts)
        if starts is not None and context_parallel is not None:
            for uploaded, whole in zip(of_documents, starts, strict=True):
                context_parallel.learn(uploaded, whole)
        return DeviceBatch(put_each(inputs), put_each(targets), of_documents, pairs, counted)
