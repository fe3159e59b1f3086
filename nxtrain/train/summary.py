"""Result of a finished run: the held-out loss, in `summary.json` and in one line for people."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from nxtrain.common.run_folder import SUMMARY_FILE
from nxtrain.data import Data, target_bytes, target_counts, unigram_entropy


@dataclass(frozen=True)
class Summary:
    """Held-out loss and the measures next to it.

    Attributes:
        val_loss: Mean loss over the evaluated tokens, in nats.
        unigram_entropy: Best loss on the same tokens of a model without context, in nats.
        bits_per_byte: Loss in bits per byte of the evaluated text, which runs with other tokenizers can be compared by;
            None if the tokenizer's tokens have no fixed number of bytes.
        val_tokens: Number of evaluated targets; none is of a prompt, or after the end of a masked document.
        val_bytes: Bytes of text of the evaluated tokens; None if unknown.
    """

    val_loss: float
    unigram_entropy: float
    bits_per_byte: float | None
    val_tokens: int
    val_bytes: int | None

    @staticmethod
    def of(val_loss: float, data: Data, num_rows: int, *, doc_mask: bool = False) -> Summary:
        """Summary of a run.

        Args:
            val_loss: Mean loss over the evaluated tokens, in nats.
            data: Data of the run; has validation rows.
            num_rows: Number of first validation rows that are evaluated, if there are so many.
            doc_mask: The evaluation has masks between documents.
        """
        rows = data.validation
        assert rows is not None
        counts = target_counts(rows, num_rows, doc_mask=doc_mask)
        num_tokens = int(counts.sum())
        num_bytes = target_bytes(counts, data.tokenizer) if data.tokenizer else None
        bits = num_tokens * val_loss / math.log(2) / num_bytes if num_bytes else None
        return Summary(val_loss, unigram_entropy(counts), bits, num_tokens, num_bytes)

    def __str__(self) -> str:
        """One line for people."""
        bits = "" if self.bits_per_byte is None else f", {self.bits_per_byte:.4f} bits per byte"
        return (
            f"held-out loss {self.val_loss:.4f} nats per token (perplexity {math.exp(self.val_loss):.1f}){bits}; "
            f"unigram entropy of the same tokens {self.unigram_entropy:.4f} "
            f"(perplexity {math.exp(self.unigram_entropy):.1f})"
        )


def summarize(folder: Path, summary: Summary, print_line: Callable[[str], None]) -> None:
    """Write and print the result of a run.

    Args:
        folder: Folder of the run.
        summary: The result.
        print_line: Prints a line for the user.
    """
    (folder / SUMMARY_FILE).write_text(json.dumps(asdict(summary), indent=2) + "\n", encoding="utf-8")
    print_line(str(summary))
