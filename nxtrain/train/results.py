"""Results of a run: held-out loss in `summary.json` and as a message, and the trained adapter."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from nxtrain.checkpoint.convert.hf_folder import HfFolder
from nxtrain.checkpoint.convert.peft import adapter_of, write_adapter
from nxtrain.checkpoint.meta import Meta
from nxtrain.checkpoint.shards import MODEL, owned, tensor_shards
from nxtrain.common.run_folder import SUMMARY_FILE
from nxtrain.config.model_folder import whole_folder
from nxtrain.config.schema import RunConfig
from nxtrain.data import Data, target_bytes, target_counts, unigram_entropy
from nxtrain.train.start import shards_of
from nxtrain.train.step import TrainState


@dataclass(frozen=True)
class Summary:
    """Held-out loss of a run, with the entropy and the size of the evaluated text for comparison.

    Attributes:
        val_loss: Mean loss over the evaluated tokens, in nats; None without such tokens.
        unigram_entropy: Best loss on the same tokens of a model without context, in nats; None without such tokens.
        bits_per_byte: Loss in bits per byte of the evaluated text, which compares runs with different tokenizers;
            None if the tokenizer's tokens have no fixed number of bytes.
        val_tokens: Number of evaluated targets; none is of a prompt, or after the end of a masked document.
        val_bytes: Bytes of text of the evaluated tokens; None if unknown.
    """

    val_loss: float | None
    unigram_entropy: float | None
    bits_per_byte: float | None
    val_tokens: int
    val_bytes: int | None

    @staticmethod
    def of(val_loss: float, data: Data, num_rows: int, *, doc_mask: bool = False) -> Summary:
        """Compute the summary of a run from its held-out loss.

        Args:
            val_loss: Mean loss over the evaluated tokens, in nats.
            data: Data of the run; has validation rows.
            num_rows: Largest number of validation rows, from the first, that are evaluated.
            doc_mask: The evaluation has masks between documents.
        """
        rows = data.validation
        assert rows is not None
        counts = target_counts(rows, num_rows, doc_mask=doc_mask)
        num_tokens = int(counts.sum())
        if not num_tokens:
            return Summary(None, None, None, 0, None)
        num_bytes = target_bytes(counts, data.tokenizer) if data.tokenizer else None
        bits = num_tokens * val_loss / math.log(2) / num_bytes if num_bytes else None
        return Summary(val_loss, unigram_entropy(counts), bits, num_tokens, num_bytes)

    def __str__(self) -> str:
        """Message with the held-out loss, the bits per byte, and the unigram entropy."""
        if self.val_loss is None or self.unigram_entropy is None:
            return "no held-out token is a target, so that there is no held-out loss"
        bits = "" if self.bits_per_byte is None else f", {self.bits_per_byte:.4f} bits per byte"
        return (
            f"held-out loss {self.val_loss:.4f} nats per token (perplexity {math.exp(self.val_loss):.1f}){bits}; "
            f"unigram entropy of the same tokens {self.unigram_entropy:.4f} "
            f"(perplexity {math.exp(self.unigram_entropy):.1f})"
        )


def summarize(folder: Path, summary: Summary, print_line: Callable[[str], None]) -> None:
    """Write the summary of a run to its folder, and print it.

    Args:
        folder: Folder of the run.
        summary: Summary of the run.
        print_line: Prints a line for the user.
    """
    (folder / SUMMARY_FILE).write_text(json.dumps(asdict(summary), indent=2) + "\n", encoding="utf-8")
    print_line(str(summary))


def base_fingerprint(config: RunConfig) -> str:
    """Fingerprint of the frozen weights below adapters; empty for a run that trains all weights."""
    if not config.finetune.adapts:
        return ""
    return HfFolder(whole_folder(config.model.hf)).fingerprint()


def save_adapter(folder: Path, state: TrainState, meta: Meta) -> None:
    """Write the adapter in PEFT's format, gathered from all ranks. Every rank calls this.

    Args:
        folder: Folder to create; an earlier adapter is replaced.
        state: Training state.
        meta: Metadata of the run.

    Raises:
        CheckpointError: The folder cannot be written.
    """
    weights = shards_of(state)[MODEL]
    state.backend.step_boundary()
    held = owned(list(tensor_shards({MODEL: weights}, state.layout)))
    mine = [(shard, shard.of(weights[shard.parameter]).cpu()) for shard in held]
    tensors: dict[str, Tensor] = {}
    for part in state.ranks.gather(mine):
        for shard, values in part:
            whole = tensors.setdefault(shard.name, torch.zeros(shard.shape, dtype=shard.dtype))
            box = zip(shard.block.offsets, shard.block.sizes, strict=True)
            whole[tuple(slice(start, start + size) for start, size in box)].copy_(values)
    state.ranks.on_leader(lambda: write_adapter(folder, adapter_of(meta, tensors)), f"cannot write {folder}")
