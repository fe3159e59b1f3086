"""Size limits for choosing kernels and laying out tensors, shared by kernels and plans; importable without torch."""

from __future__ import annotations

LONG_SEQUENCE = 8192
"""Tokens per sequence from which `train.remat=selective` also recomputes feed-forward layers.

Source: the Llama recipes of NeuronX Distributed, which recompute CoreAttention, and LlamaMLP too at this length.
"""

SEQUENCE_TILE = 2048
"""Tokens per tile of NKI's flash kernel; a sequence length must be a multiple of this number."""

MAX_HEAD_SIZE = 128
"""Largest head size of NKI's flash kernel: the rows of a matrix multiplication on Trainium."""

CPU_BLOCK = 64
"""Queries per block of CPU attention; blocks of 128 take up to a third longer, since their scores exceed the cache."""

CPU_KEPT_BYTES = 16 << 20
"""Most bytes of probabilities that CPU attention saves for backward; above, torch's flash kernel is used."""

ATTENTION_BLOCK_BYTES = 64 << 20
"""Most bytes of the float32 scores of one block of queries, in blocked attention."""

MIN_ATTENTION_ROWS, MAX_ATTENTION_ROWS = 16, 512
"""Fewest and most queries per block of blocked attention."""

XLA_LOOPS = 4
"""Most loops over query blocks in the attention graph on PyTorch/XLA; up to this number of blocks there is no loop."""

LONGEST_SCORES = 2048
"""Longest sequence, in tokens, whose scores are computed at once; longer sequences use blocked attention."""

MIN_FLEX_HEAD = 16
"""Smallest head size of torch's FlexAttention on a GPU."""

FLASH_HEAD_MULTIPLE, MAX_FLASH_HEAD = 8, 256
"""Head sizes of torch's FlashAttention on a GPU: multiples of the first number, up to the second."""

NF4_GROUP = 256
"""NF4 blocks per group; the scales of a group share a float32 factor."""

NF4_FLOAT = 4
"""Bytes of a float32."""


def keeps_probabilities(batch: int, heads: int, length: int, element_size: int) -> bool:
    """True if CPU attention saves the probabilities of a rank's sequences for its backward pass."""
    return batch * heads * length * (length + CPU_BLOCK) // 2 * element_size <= CPU_KEPT_BYTES


def block_rows(heads: int, num_keys: int) -> int:
    """Queries per block such that the scores of all heads of a batch fit `ATTENTION_BLOCK_BYTES`."""
    rows = ATTENTION_BLOCK_BYTES // (4 * heads * max(1, num_keys))
    return max(MIN_ATTENTION_ROWS, min(MAX_ATTENTION_ROWS, rows))


def nf4_offsets(block: int, num_blocks: int, num_groups: int, num_parts: int) -> tuple[int, int, int]:
    """Byte offsets of an NF4 matrix in packed storage: of its scales, of its factors, and of its end.

    Args:
        block: Weights per block; a byte holds two weights.
        num_blocks, num_groups: Blocks on this rank, and groups of the whole matrices.
        num_parts: Matrices in the stack; each has a mean.
    """
    codes = num_blocks * block // 2
    scales = codes + -(-num_blocks // NF4_FLOAT) * NF4_FLOAT
    return codes, scales, scales + (num_groups + num_parts) * NF4_FLOAT
