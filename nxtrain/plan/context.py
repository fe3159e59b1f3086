"""Predicted costs of context parallelism on a rank: kept tensors, attention workspace, traffic, and load imbalance.

The formulas follow `parallel/context_parallel.py` and `backends/ranged_attention.py`. A rank holds T = S / cp
positions. Its queries meet the keys of all ranks: S keys at once with the method `gather`, and T keys at a time with
`ring`.
"""

from __future__ import annotations

from nxtrain.backends.limits import block_rows
from nxtrain.common.sequence_cut import SequenceCut
from nxtrain.plan.job import SIZES, Job, once_per_job

FLOAT, POSITION = SIZES["fp32"], 8
"""Bytes of a float32 number, and of a position."""

FORWARD_SCORES, BACKWARD_SCORES = 1, 2
"""Number of float32 score tensors of a block that exist at once, in the forward and in the backward pass."""

MASK_BYTES = 3
"""Bytes of a block's masks per (query, key) pair: three masks, for keys after, keys before, and both."""


@once_per_job
def row_sums_bytes(job: Job) -> int:
    """Bytes of row sums and positions that context parallel attention saves with queries, keys, values and output."""
    train = job.config.train
    sums = train.micro_batch * job.local_heads * job.local_len * FLOAT
    positions = 0
    if not job.config.data.doc_mask:
        positions += job.local_len * POSITION
    if job.cp_method == "gather":
        positions += train.seq_len * POSITION
    return sums + positions


@once_per_job
def forward_context_bytes(job: Job) -> int:
    """Bytes that the forward pass of context parallel attention needs in addition to its queries, keys and values.

    The method `gather` holds keys and values in the order of ranks and in the order of positions. The method `ring`
    holds the current block, the next block, and the accumulated output.
    """
    output = job.micro_tokens * job.query_width * FLOAT
    exchanged = 2 * _keys_bytes(job, job.params_size)
    if job.fuses_context:
        narrow = job.micro_tokens * job.query_width * job.params_size
        if job.cp_method == "gather":
            return exchanged + 2 * narrow
        return exchanged + 4 * output + narrow  # the outputs of two blocks, each times its share, and their sum
    if job.cp_method == "ring":
        exchanged += output
    return exchanged + _copied_keys(job) + _block_bytes(job, FORWARD_SCORES) + 2 * output


@once_per_job
def backward_context_bytes(job: Job) -> int:
    """Bytes of the largest temporary tensors in the backward pass of context parallel attention.

    They include float32 gradients in addition to the tensors of the forward pass. With `gather`, gradients of all keys
    exist until they are summed. With `ring`, the gradients of a block arrive, are added to this rank's, and are sent
    on.
    """
    if job.fuses_context:
        return _flash_bytes(job)
    queries = job.micro_tokens * job.query_width * FLOAT
    key_grads = _keys_bytes(job, FLOAT)
    exchanged = 2 * _keys_bytes(job, job.params_size)
    in_block = _block_bytes(job, BACKWARD_SCORES) + queries + key_grads
    joined = 2 * key_grads + queries
    if job.cp_method == "ring":
        exchanged += queries + 2 * key_grads
    return exchanged + _copied_keys(job) + max(in_block, joined)


def _flash_bytes(job: Job) -> int:
    """Bytes of the largest temporary tensors in FlashAttention's backward pass, as `backends/flash_ranges.py` calls it.

    The kernel sums the queries' gradients in float32, and computes gradients of keys and values for each query head.
    """
    queries = job.micro_tokens * job.query_width
    narrow, wide = queries * job.params_size, queries * FLOAT
    keys, key_grads = _keys_bytes(job, job.params_size), _keys_bytes(job, FLOAT)
    repeats = job.local_heads // job.local_kv_heads
    by_head = keys * repeats if repeats > 1 else 0
    of_calls = 2 * narrow + wide + 2 * keys + by_head  # earlier gradients, those of a call, and the kernel's own
    # Then gradients of keys and values are joined. `gather` sorts them by rank; for zigzag, it reverses one half.
    if job.cp_method == "ring":
        return wide + 2 * keys + 2 * key_grads + max(of_calls, narrow + 2 * keys + 2 * key_grads)
    parallel = job.config.parallel
    is_in_order = SequenceCut.of(job.config.train.seq_len, parallel.cp, parallel.cp_layout).layout == "contiguous"
    joined = 2 * key_grads if is_in_order else 7 * key_grads // 2
    return keys + max(of_calls, narrow + joined)


def _keys_bytes(job: Job, size: int) -> int:
    """Bytes of the keys and values that attention reads at once."""
    tokens = job.micro_tokens
    if job.cp_method == "gather":
        tokens *= job.config.parallel.cp
    return 2 * tokens * job.key_width * size


def _copied_keys(job: Job) -> int:
    """Bytes of keys and values copied to the layout and type of matrix products; 0 if views suffice."""
    size = job.params_size
    if job.backend == "cpu":
        size = FLOAT
    if job.config.train.micro_batch == 1 and size == job.params_size:
        return 0
    return _keys_bytes(job, size)


def _block_bytes(job: Job, num_scores: int) -> int:
    """Bytes of the scores and the mask of a block of queries, on the rank whose last queries see all keys."""
    num_keys = job.local_len
    if job.cp_method == "gather":
        num_keys = job.config.train.seq_len
    batch = job.config.train.micro_batch
    heads = batch * job.local_heads
    rows = min(job.local_len, block_rows(heads, num_keys))
    scores = num_scores * FLOAT
    if job.params_size < FLOAT and job.backend != "cpu":  # a CPU multiplies in float32
        scores += job.params_size
    return rows * num_keys * (heads * scores + batch * MASK_BYTES)


def work_share(job: Job, window: int | None = None, *, skips: bool) -> float:
    """Attention work of the busiest context parallel rank, relative to the mean of all ranks in causal attention.

    Args:
        job: The run.
        window: Tokens that a query of the layer sees; None for all tokens before it.
        skips: Attention skips the keys after its queries, as on eager devices. In compiled graphs, queries meet all
            keys.
    """
    all_pairs = SequenceCut(job.config.train.seq_len, 1, "contiguous").pairs(0, window)
    return _most_pairs(job, window, skips=skips) * job.config.parallel.cp / all_pairs


def moved_scores(job: Job, window: int | None = None) -> int:
    """Bytes of scores that a layer's attention writes and reads in a forward pass, on the rank with the most scores."""
    pairs = _most_pairs(job, window, skips=not job.meets_all_keys)
    return job.config.train.micro_batch * job.local_heads * pairs * 2 * FLOAT


def _most_pairs(job: Job, window: int | None, *, skips: bool) -> int:
    """Most (query, key) pairs that a context parallel rank computes."""
    parallel, seq_len = job.config.parallel, job.config.train.seq_len
    if not skips:
        return job.local_len * seq_len
    cut = SequenceCut.of(seq_len, parallel.cp, parallel.cp_layout)
    return max(cut.pairs(0, window), cut.pairs(parallel.cp - 1, window))


def context_bytes(job: Job, num_blocks: int) -> tuple[float, float]:
    """Bytes that a rank sends over cp for one micro-batch through some blocks, in the forward and in the backward pass.

    Keys and values are sent in the type of the parameters, in both passes. Their gradients are sent in float32. With
    `ring`, gradients travel around the whole ring, back to their own rank.
    """
    parallel, remat = job.config.parallel, job.config.train.remat
    if parallel.cp == 1:
        return 0.0, 0.0
    own = 2 * job.micro_tokens * job.key_width
    others = parallel.cp - 1
    forward = float(num_blocks * others * own * job.params_size)
    gradient_hops = others
    if job.cp_method == "ring":
        gradient_hops = parallel.cp
    backward = forward + num_blocks * gradient_hops * own * FLOAT
    if remat != "none":  # attention is computed again, and exchanges again
        backward += forward
    return forward, backward
