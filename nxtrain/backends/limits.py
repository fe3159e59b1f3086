"""Sizes by which implementations are chosen and tensors are laid out, for the code and for plans; without torch."""

from __future__ import annotations

LONG_SEQUENCE = 8192
"""Tokens per sequence from which `remat=selective` takes feed-forwards too.

Source: the Llama recipes of NeuronX Distributed, which recompute CoreAttention, and LlamaMLP too at this length.
"""

SEQUENCE_TILE = 2048
"""Tokens of a tile of NKI's flash kernel; sequences are multiples of it."""

MAX_HEAD_SIZE = 128
"""Rows of the matrix multiplication of NKI's flash kernel."""

CPU_BLOCK = 64
"""Queries of a block of attention on CPU. Blocks of 128 take up to a third longer, as their scores leave the cache."""

CPU_KEPT_BYTES = 16 << 20
"""Most bytes of probabilities that attention on CPU keeps for its backward pass; torch's kernel takes longer rows."""

ATTENTION_BLOCK_BYTES = 64 << 20
"""Most bytes of the float32 scores of a block of queries, in attention that is computed block by block."""

MIN_ATTENTION_ROWS, MAX_ATTENTION_ROWS = 16, 512
"""Fewest and most queries of a block, in attention that is computed block by block."""

XLA_LOOPS = 4
"""Most loops over blocks in an attention's graph on PyTorch/XLA; up to this number of blocks, there is no loop."""

LONGEST_SCORES = 2048
"""Tokens of the longest sequence whose scores elementary operations compute at once; longer ones go block by block."""

MIN_FLEX_HEAD = 16
"""Narrowest head that torch's FlexAttention multiplies on a GPU."""

FLASH_HEAD_MULTIPLE, MAX_FLASH_HEAD = 8, 256
"""Divisor of the size of heads that torch's FlashAttention takes on a GPU, and the largest size."""

NF4_GROUP = 256
"""Blocks of a group of NF4, whose scales share a factor."""

NF4_FLOAT = 4
"""Bytes of a float32."""


def keeps_probabilities(batch: int, heads: int, length: int, element_size: int) -> bool:
    """True if attention on CPU keeps the probabilities of a rank's sequences."""
    return batch * heads * length * (length + CPU_BLOCK) // 2 * element_size <= CPU_KEPT_BYTES


def block_rows(heads: int, num_keys: int) -> int:
    """Number of queries of a block whose scores, of all heads of a batch, fit `ATTENTION_BLOCK_BYTES`."""
    rows = ATTENTION_BLOCK_BYTES // (4 * heads * max(1, num_keys))
    return max(MIN_ATTENTION_ROWS, min(MAX_ATTENTION_ROWS, rows))


def nf4_offsets(block: int, num_blocks: int, num_groups: int, num_parts: int) -> tuple[int, int, int]:
    """Bytes of a packed matrix before its scales, before its factors, and of all.

    Args:
        block: Weights of a block, two to a byte.
        num_blocks, num_groups: Blocks that the rank holds, and groups of the whole matrices.
        num_parts: Matrices in the stack, each with a mean.
    """
    codes = num_blocks * block // 2
    scales = codes + -(-num_blocks // NF4_FLOAT) * NF4_FLOAT
    return codes, scales, scales + (num_groups + num_parts) * NF4_FLOAT
