"""The example's Llama in the pipeline of NeuronX Distributed, cut by either of the two ways that it has."""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.support import nxd_oracle
from tests.support.nxd_golden import (
    CASES,
    FILE,
    MODEL,
    SEQ_LEN,
    SOURCE,
    Case,
    Course,
    Distance,
    bound,
    content,
    our_course,
    our_plan,
    recorded,
    token_file,
)
from tests.support.ranks import RankPool
from tests.support.runs import train_rank

PACKAGES = ("torch", "torch-xla", "transformers")


def record(pool: RankPool, case: Case, example: Path) -> Course:
    """Course of NeuronX Distributed, which all ranks must report alike."""
    first, *others = pool.run(case.world, nxd_oracle.train, case, example)
    assert all(other == first for other in others), f"the ranks report different courses: {[first, *others]}"
    course: Course = first
    return course


def contradictions(nxd: Mapping[str, Course], ours: Mapping[str, Course]) -> Iterator[str]:
    """Contradictions to calling a case exact, or defective."""
    for name, case in CASES.items():
        distance = Distance.between(nxd[name], ours[name])
        exact = distance.within(bound(case, nxd))
        if exact == bool(case.defect):
            yield f"{name}: {distance} from ours; recorded as {case.defect or 'exact'}"


def changes(nxd: Mapping[str, Course]) -> Iterator[str]:
    """Courses that are not those recorded."""
    for name, case in CASES.items():
        distance = Distance.between(nxd[name], recorded()[name])
        if not distance.within(bound(case, recorded())):
            yield f"{name}: {distance} from what is recorded"


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.nxd_stages", description=__doc__.partition("\n")[0])
    parser.add_argument("example", type=Path, help=f"{SOURCE['model']} of {SOURCE['repository']}")
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name} instead of comparing with it")
    options = parser.parse_args()
    nxd, ours = {}, {}
    with tempfile.TemporaryDirectory() as folder, closing(RankPool()) as pool:
        tokens = token_file(Path(folder))
        for name, case in CASES.items():
            nxd[name] = record(pool, case, options.example)
            pool.run(1, train_rank, our_plan(case.alone, Path(folder) / name, tokens))
            ours[name] = our_course(Path(folder) / name)
            distance = Distance.between(nxd[name], ours[name])
            print(f"{name:20} from ours: loss {distance.loss:.1e}  norm {distance.norm:.1e}", flush=True)
    wrong = [*contradictions(nxd, ours), *([] if options.write else changes(nxd))]
    print(*wrong, sep="\n", file=sys.stderr)
    if options.write and not wrong:
        write(nxd)
    return 1 if wrong else 0


def write(nxd: Mapping[str, Course]) -> None:
    """Write the file, one line per list of numbers."""
    text = json.dumps(content(nxd, {name: version(name) for name in PACKAGES}), indent=2)
    text = re.sub(
        r"\[[^\[\]{}]*\]", lambda match: " ".join(match[0].split()).replace("[ ", "[").replace(" ]", "]"), text
    )
    FILE.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())


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
