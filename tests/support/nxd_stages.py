"""The example's Llama in the pipeline of NeuronX Distributed, cut by either of the two ways that it has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.support.nxd_golden import MODEL, SEQ_LEN, Case

IGNORED = -100
"""Label that the example's loss leaves out."""
LENGTH = SEQ_LEN + 2
"""Tokens of a row: the example shifts labels against inputs; one more, ignored, makes the length divide by tp."""


def micro_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and labels, both (rows, `LENGTH`), of rows of tokens that tell both."""
    more = rows.new_zeros(len(rows), 1)
    return torch.cat([rows, more], 1), torch.cat([rows, more + IGNORED], 1)


def pipeline_config(case: Case, example: Any) -> dict[str, Any]:
    """Settings of NeuronX Distributed, as in the example's script for pipelines."""
    common: dict[str, Any] = {
        "num_microbatches": case.accumulation,
        "virtual_pipeline_size": case.virtual_pp,
        "broadcast_and_average_loss": True,
        "use_zero1_optimizer": case.zero1,
        "use_optimizer_wrapper": True,
    }
    if case.stages == "manual":
        return {
            **common,
            "manual_pp_partition": True,
            "manual_pp_stage_partition_fn": first_and_rest,
            "manual_pp_loss_fn": token_loss,
        }
    from neuronx_distributed.parallel_layers import mappings

    num_stages = case.pp * case.virtual_pp
    layers = MODEL["num_hidden_layers"]
    return {
        **common,
        "transformer_layer_cls": example.LlamaDecoderLayer,
        "output_loss_value_spec": (True, False),
        "input_names": ["input_ids", "attention_mask", "labels"],
        "pipeline_cuts": [f"model.layers.{stage * layers // num_stages - 1}" for stage in range(1, num_stages)],
        "leaf_module_cls": [example.LlamaRMSNorm.__name__, example.LlamaRotaryEmbedding.__name__],
        "autowrap_modules": [mappings],
    }


def pipeline_batch(case: Case, rows: Tensor) -> dict[str, Tensor]:
    """All micro-batches of a step on one rank, by the names of the arguments that take them."""
    inputs, labels = micro_rows(rows)
    if case.stages == "manual":
        return {"inputs": inputs, "labels": labels}
    # The trace needs a tensor where the example, whose attention is causal whatever it is given, does not look.
    return {"input_ids": inputs, "attention_mask": torch.ones_like(inputs), "labels": labels}


def layer_list(model: Any, case: Case) -> list[nn.Module]:
    """The example's model as the list of modules, each a function of one tensor, that the manual partition takes."""
    from neuronx_distributed.pipeline.manual_pipe_stage import PipelineStageModule

    body = model.model
    first, last = _Embedding(body.embed_tokens), _Head(body.norm, model.lm_head, case.sequence_parallel)
    if case.tied:
        PipelineStageModule.mark_weight_sharing([(first, "weight"), (last, "weight")], "embedding")
    return [first, *(_Block(layer, body.rotary_emb) for layer in body.layers), last]


def first_and_rest(layers: list[nn.Module], num_stages: int) -> dict[nn.Module, int]:
    """The embedding with the first blocks, the head with the last: a stage for each module."""
    blocks = len(layers) - 2
    stages = [index * num_stages // blocks for index in range(blocks)]
    return dict(zip(layers, [0, *stages, num_stages - 1], strict=True))


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The example's loss, of which a list of layers has no part."""
    from neuronx_distributed.parallel_layers.loss_functions import parallel_cross_entropy

    logits, labels = logits.float()[:, :-1].clone().flatten(0, 1), labels[:, 1:].flatten()
    valid = (labels != IGNORED).float()
    loss: Tensor = (parallel_cross_entropy(logits, labels) * valid).sum() / valid.sum()
    return loss


class _Embedding(nn.Module):
    def __init__(self, embed_tokens: nn.Module) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens

    @property
    def weight(self) -> Any:
        # Sharing is marked by a path of names, but the sum looks up only one name.
        return self.embed_tokens.weight

    def forward(self, inputs: list[Tensor]) -> Any:
        return self.embed_tokens(inputs[0])


class _Block(nn.Module):
    def __init__(self, layer: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.layer, self.rotary = layer, rotary

    def forward(self, x: Tensor) -> Any:
        positions = torch.arange(LENGTH)[None]
        return self.layer(x, position_ids=positions, position_embeddings=self.rotary(x, positions))[0]


class _Head(nn.Module):
    def __init__(self, norm: nn.Module, lm_head: nn.Module, sequence_parallel: bool) -> None:
        super().__init__()
        self.norm, self.lm_head = norm, lm_head
        self.sequence_parallel = sequence_parallel

    @property
    def weight(self) -> Any:
        return self.lm_head.weight

    def forward(self, x: Tensor) -> tuple[Tensor]:
        logits = self.lm_head(self.norm(x))
        # A tuple: of anything else the pipeline hands the loss only the first element, that is one sequence.
        return (logits.transpose(0, 1) if self.sequence_parallel else logits,)
