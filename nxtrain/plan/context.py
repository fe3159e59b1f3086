"""Costs of context parallelism on a rank: kept tensors, workspace of attention, exchanged bytes, and uneven work.

The formulas follow `parallel/context_parallel.py` and `backends/ranged_attention.py`. A rank holds T = S / cp
positions. Its queries meet the keys of all ranks: S at once by gather, and T at a time by ring.
"""

from __future__ import annotations

from nxtrain.backends.limits import block_rows
from nxtrain.common.sequence_cut import SequenceCut
from nxtrain.plan.job import SIZES, Job, once_per_job

FLOAT, POSITION = SIZES["fp32"], 8
"""Bytes of a float32 number, and of a position."""

FORWARD_SCORES, BACKWARD_SCORES = 1, 2
"""Float32 tensors of a block's scores that exist at once."""

MASK_BYTES = 3
"""Bytes of a block's masks for each pair of a query and a key: keys after, keys before, and both."""


@once_per_job
def kept_numbers(job: Job) -> int:
    """Bytes that attention keeps beside queries, keys, values and output: a sum for each query, and positions."""
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
    """Bytes that attention's forward pass needs in addition to its queries, keys and values.

    Gather holds keys and values as they came, and in order. Ring holds a block at hand, the next one, and the output
    so far.
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
    """Largest tensors of attention's backward pass: gradients in float32 beside what the forward pass has.

    By gather, gradients of all keys wait for their sum. By ring, those of a block arrive, and leave with this rank's.
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
    """Largest tensors of the backward pass by FlashAttention, as `backends/flash_ranges.py` calls it.

    The kernel sums the queries' gradients in float32, and has gradients of keys and values for each query head.
    """
    queries = job.micro_tokens * job.query_width
    narrow, wide = queries * job.params_size, queries * FLOAT
    keys, key_grads = _keys_bytes(job, job.params_size), _keys_bytes(job, FLOAT)
    repeats = job.local_heads // job.local_kv_heads
    by_head = keys * repeats if repeats > 1 else 0
    of_calls = 2 * narrow + wide + 2 * keys + by_head  # gradients so far, those of a call, and the kernel's own
    # Then those of keys and values are joined. Gather puts them in the order of the ranks, of zigzag by a turned half.
    if job.cp_method == "ring":
        return wide + 2 * keys + 2 * key_grads + max(of_calls, narrow + 2 * keys + 2 * key_grads)
    parallel = job.config.parallel
    is_in_order = SequenceCut.of(job.config.train.seq_len, parallel.cp, parallel.cp_layout).layout == "contiguous"
    joined = 2 * key_grads if is_in_order else 7 * key_grads // 2
    return keys + max(of_calls, narrow + joined)


def _keys_bytes(job: Job, size: int) -> int:
    """Bytes of the keys and values that attention meets at once."""
    tokens = job.micro_tokens
    if job.cp_method == "gather":
        tokens *= job.config.parallel.cp
    return 2 * tokens * job.key_width * size


def _copied_keys(job: Job) -> int:
    """Bytes of keys and values in the order and the type of matrix products; none where views serve."""
    size = job.params_size
    if job.backend == "cpu":
        size = FLOAT
    if job.config.train.micro_batch == 1 and size == job.params_size:
        return 0
    return _keys_bytes(job, size)


def _block_bytes(job: Job, num_scores: int) -> int:
    """Bytes of the scores of a block of queries, and of its mask, on the rank whose last queries see all keys."""
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
    """Work of the rank with most of a layer's attention, over the mean of all ranks in causal attention.

    Args:
        job: The run.
        window: Tokens that a query of the layer sees; None: all before.
        skips: Attention leaves out the keys after its queries, as eager devices do; graphs of all ranks meet all keys.
    """
    all_pairs = SequenceCut(job.config.train.seq_len, 1, "contiguous").pairs(0, window)
    return _most_pairs(job, window, skips=skips) * job.config.parallel.cp / all_pairs


def moved_scores(job: Job, window: int | None = None) -> int:
    """Bytes of scores that a layer's attention writes and reads once forward, on the rank with most of them."""
    pairs = _most_pairs(job, window, skips=not job.meets_all_keys)
    return job.config.train.micro_batch * job.local_heads * pairs * 2 * FLOAT


def _most_pairs(job: Job, window: int | None, *, skips: bool) -> int:
    """Most pairs of a query and a key that a rank computes."""
    parallel, seq_len = job.config.parallel, job.config.train.seq_len
    if not skips:
        return job.local_len * seq_len
    cut = SequenceCut.of(seq_len, parallel.cp, parallel.cp_layout)
    return max(cut.pairs(0, window), cut.pairs(parallel.cp - 1, window))


def context_bytes(job: Job, num_blocks: int) -> tuple[float, float]:
    """Bytes that a rank sends over cp for one micro-batch through some blocks: forward, and backward.

    Keys and values travel in the type of the parameters, in both passes. Their gradients travel in float32. By ring
    these make a whole turn, and come back to their rank.
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
