"""Bytes that autograd keeps of one micro-batch, and the largest tensors of the layer at work.

Each term names the tensor that is kept. Views keep the whole tensor that they show; so keys that share a matrix with
queries keep both.
"""

from __future__ import annotations

from nxtrain.backends.limits import CPU_BLOCK, LONG_SEQUENCE
from nxtrain.plan.adapters import AdaptedLayer, adapted_layers
from nxtrain.plan.job import SIZES, Job, once_per_job

FLOAT = SIZES["fp32"]


@once_per_job
def block_bytes(job: Job) -> int:
    """Bytes kept of one block from its forward to its backward pass."""
    if job.config.train.remat == "full":
        return boundary_bytes(job)
    return _whole_block_bytes(job, job.config.train.remat)


@once_per_job
def boundary_bytes(job: Job) -> int:
    """Bytes of the residual stream between two layers."""
    return job.sequence_rows * job.dimensions.hidden_size * job.params_size


def _whole_block_bytes(job: Job, remat: str) -> int:
    skips_mlp = remat == "selective" and _is_long(job)
    # Each of two norms keeps its input and a number per row, and the column layer after it keeps its own input.
    norms = 2 * (boundary_bytes(job) + job.sequence_rows * FLOAT)
    inputs = _input_bytes(job, ATTENTION_IN, boundary_bytes(job))
    inputs += boundary_bytes(job) if skips_mlp else _input_bytes(job, MLP_IN, boundary_bytes(job))
    kept = norms + inputs + _attention_bytes(job, recomputed=remat == "selective")
    return kept + (0 if skips_mlp else _mlp_bytes(job))


@once_per_job
def untracked_bytes(job: Job) -> int:
    """Bytes that the model's first block does not keep: nothing has a gradient before the first adapter."""
    remat = job.config.train.remat
    return 0 if remat == "full" else _untracked_bytes(job, remat)


def _untracked_bytes(job: Job, remat: str) -> int:
    if job.adapters is None:
        return 0
    recomputed, size = remat == "selective", boundary_bytes(job)
    free = size + job.sequence_rows * FLOAT  # input of the first norm
    if _adapted(job, ATTENTION_IN):
        return free
    free += _attention_bytes(job, recomputed=recomputed) - _input_bytes(job, ATTENTION_OUT, _out_bytes(job))
    if _adapted(job, ATTENTION_OUT):
        return free
    free += size + job.sequence_rows * FLOAT
    if recomputed and _is_long(job):
        return free
    if names := [layer.name for layer in _adapted(job, MLP_IN)]:
        # Unfused, a frozen gate keeps no input of its activation, and beside a frozen other part no result is kept.
        frozen_parts = {"up_proj": 2, "gate_proj": 1}
        return free + _product_bytes(job) * (frozen_parts.get(names[0], 0) if len(names) == 1 else 0)
    return free + _mlp_bytes(job) - _input_bytes(job, MLP_OUT, _product_bytes(job))


ATTENTION_IN = ("qkv_proj", "q_proj", "k_proj", "v_proj")
ATTENTION_OUT = ("o_proj",)
MLP_IN = ("gate_up_proj", "gate_proj", "up_proj")
MLP_OUT = ("down_proj",)
"""Linear layers that share an input, fused or not."""


def _adapted(job: Job, names: tuple[str, ...]) -> list[AdaptedLayer]:
    """Layers of a block with adapters, of some names."""
    if job.adapters is None:
        return []
    layers = adapted_layers(job.stage(0), job.config.parallel.tp, job.adapters)
    return [layer for layer in layers if layer.name in names]


def _keeps_input(job: Job, names: tuple[str, ...]) -> bool:
    """True if some layer keeps its input as it is: for its weight, or for an adapter without dropout."""
    return job.adapters is None or (bool(_adapted(job, names)) and not job.config.finetune.dropout)


def _input_bytes(job: Job, names: tuple[str, ...], size: int, *, kept_anyway: bool = False) -> int:
    """Bytes that linear layers with one input keep: the input, and what adapters keep.

    Adapters keep what dropout left of the input with a byte per entry, and their own columns.

    Args:
        job: The run.
        names: Names of the layers.
        size: Bytes of the input.
        kept_anyway: Something else keeps the input as well.
    """
    layers = _adapted(job, names)
    own = size if kept_anyway or _keeps_input(job, names) else 0
    dropped = len(layers) * (size + size // job.params_size) if job.config.finetune.dropout else 0
    tokens = {True: job.micro_tokens, False: job.sequence_rows}
    return own + dropped + sum(layer.width * tokens[layer.is_column] for layer in layers) * job.params_size


def _attention_bytes(job: Job, *, recomputed: bool) -> int:
    """Queries, keys, values and the output, which the row layer keeps as well; then what the kernel adds.

    Norms of heads keep their inputs, and a number per head. Queries and keys are then rotated apart.
    """
    width, tokens, size = job.dimensions.head_size, job.micro_tokens, job.params_size
    queries, keys = job.local_heads * width, job.local_kv_heads * width
    repeats = job.local_heads // job.local_kv_heads
    fused, normed = job.config.model.fused_qkv, job.dimensions.head_norms
    rotated, value = queries + keys, (queries + 2 * keys if fused else keys)
    if recomputed or not job.repeats_heads or 1 in (repeats, job.local_kv_heads):  # one K/V head is a view
        inputs = rotated + value + (rotated if normed and not fused else 0)
    else:  # repeated K/V heads are kept; of the given ones only the queries, and what they share a tensor with
        inputs = (rotated if fused and not normed else queries) + 2 * queries
        inputs += (value if fused else rotated) if normed else 0
    kernel_keeps = not recomputed and job.attention in ("fused", "grouped", "masked")
    out = _input_bytes(job, ATTENTION_OUT, _out_bytes(job), kept_anyway=kernel_keeps)
    kept = inputs * tokens * size + out
    kept += (job.local_heads + job.local_kv_heads) * tokens * FLOAT if normed else 0
    return kept if recomputed else kept + _core_bytes(job)


def _out_bytes(job: Job) -> int:
    """Bytes of the output of attention."""
    return job.local_heads * job.dimensions.head_size * job.micro_tokens * job.params_size


def _core_bytes(job: Job) -> int:
    """Bytes that the attention kernel keeps on top of its inputs and its output."""
    train = job.config.train
    heads = train.micro_batch * job.local_heads
    if job.attention == "blocked":  # probabilities of blocks of queries against the keys before them
        ends = [min(start + CPU_BLOCK, train.seq_len) for start in range(0, train.seq_len, CPU_BLOCK)]
        rows = [end - start for start, end in zip(range(0, train.seq_len, CPU_BLOCK), ends, strict=True)]
        return heads * sum(row * end for row, end in zip(rows, ends, strict=True)) * job.params_size
    if job.attention == "scores":  # probabilities, and the masked scores from which a compiler may not free them
        return 2 * heads * train.seq_len**2 * job.params_size
    return heads * train.seq_len * FLOAT + _mask_bytes(job)  # logarithm of each row's sum


def _mask_bytes(job: Job) -> int:
    """Bytes of the mask of documents that a fused kernel gets, as numbers that it adds to the scores."""
    train = job.config.train
    return train.micro_batch * train.seq_len**2 * job.params_size if job.attention == "masked" else 0


def _mlp_bytes(job: Job) -> int:
    """Gate and up, kept by `nn/mlp.py:_SwiGLU`, and their product, kept by the row layer."""
    gated = 3 if job.config.model.fused_gate_up else 4  # unfused, autograd keeps silu(gate) too
    kept = gated if job.dimensions.gated else 2
    size = _product_bytes(job)
    return (kept - 1) * size + _input_bytes(job, MLP_OUT, size)


def _product_bytes(job: Job) -> int:
    """Bytes of the input of the feed-forward's row layer."""
    return -(-job.dimensions.intermediate_size // job.config.parallel.tp) * job.micro_tokens * job.params_size


@once_per_job
def working_bytes(job: Job) -> int:
    """Largest tensors of a layer's backward pass that are not kept from its forward pass.

    In the feed-forward: the gradients of the product, of the gate, of both together, and a factor; unfused, those of
    the product and of both parts. The product itself is free by then. Backward recomputes one part at a time.
    """
    train = job.config.train
    mlp, attention = _mlp_work_bytes(job), attention_work_bytes(job)
    if train.remat == "selective":
        attention += _attention_bytes(job, recomputed=False) - _attention_bytes(job, recomputed=True)
        if _is_long(job):
            return max(mlp + _mlp_bytes(job), attention)
    # Then the feed-forward's tensors are free, but postponed weight gradients keep as many.
    later = max(attention, norm_work_bytes(job)) + (boundary_bytes(job) if job.postpones else -_mlp_bytes(job))
    work = max(mlp, later)
    return work + (_whole_block_bytes(job, "none") - boundary_bytes(job) if train.remat == "full" else 0)


def _mlp_work_bytes(job: Job) -> int:
    gated = 5 if job.config.model.fused_gate_up else 3
    freed = job.dimensions.gated and _keeps_input(job, MLP_OUT) and not job.postpones
    return ((gated if job.dimensions.gated else 2) - freed) * _product_bytes(job)


@once_per_job
def first_working_bytes(job: Job) -> int:
    """As `working_bytes`, of the model's first block, whose backward pass ends at its first adapter."""
    train = job.config.train
    if job.adapters is None or _adapted(job, ATTENTION_IN) or (train.remat == "selective" and _is_long(job)):
        return working_bytes(job)
    work = boundary_bytes(job)
    if _adapted(job, ATTENTION_OUT):
        work = max(_mlp_work_bytes(job), norm_work_bytes(job) - _mlp_bytes(job))
    elif _adapted(job, MLP_IN):
        work = _mlp_work_bytes(job)
    if train.remat != "full":
        return work
    kept = _whole_block_bytes(job, "none") - _untracked_bytes(job, "none")
    return max(work + kept, forward_working_bytes(job) - boundary_bytes(job))


@once_per_job
def forward_working_bytes(job: Job) -> int:
    """Largest tensors of a block's forward pass if nothing is kept, the stream and its norm included.

    In the feed-forward: gate, up, and the product. In attention: queries, keys and values as projected and as rotated,
    the output, and what the kernel works with. Fused layers with adapters have their result four times: of the matrix,
    of each adapter, of these together, and the sum. Others have it thrice.
    """
    train, width, size, tokens = job.config.train, job.dimensions.head_size, job.params_size, job.micro_tokens
    queries, keys = job.local_heads * width, job.local_kv_heads * width
    heads, rows = train.micro_batch * job.local_heads, min(CPU_BLOCK, train.seq_len)
    attention = (2 * queries + 3 * keys) * tokens * size + _out_bytes(job) + _core_bytes(job)
    if job.attention == "blocked":  # keys in float32, scores before and after softmax, and copies with the heads first
        copies = (queries + 2 * keys) * size if train.micro_batch > 1 else 0  # of one sequence these are views
        attention += (copies + keys * FLOAT) * tokens + 2 * heads * rows * train.seq_len * FLOAT
    elif job.repeats_heads and job.local_heads > job.local_kv_heads > 1:
        attention += 2 * queries * tokens * size
    elif job.attention == "scores":
        attention += heads * train.seq_len**2 * FLOAT
    parts = 3 if job.dimensions.gated else 2
    if _adapted(job, MLP_IN):
        parts = 4 * 2 if job.config.model.fused_gate_up and job.dimensions.gated else 4
    return 2 * boundary_bytes(job) + max(attention, parts * _product_bytes(job))


def _is_long(job: Job) -> bool:
    return job.config.train.seq_len >= LONG_SEQUENCE


@once_per_job
def norm_work_bytes(job: Job) -> int:
    """Float32 tensors of a norm's backward pass: two products, their difference, the result, and a wide gradient."""
    number = 4 if job.params_size == FLOAT else 5
    return number * job.sequence_rows * job.dimensions.hidden_size * FLOAT


@once_per_job
def attention_work_bytes(job: Job) -> int:
    """Gradients of queries, keys and values; for kernels without fusion, scores in float32 and narrow as well."""
    train, width, size = job.config.train, job.dimensions.head_size, job.params_size
    queries, keys = job.local_heads * width, job.local_kv_heads * width
    heads = train.micro_batch * job.local_heads
    if job.attention == "blocked":
        narrow = size if size < FLOAT else 0
        rows = min(CPU_BLOCK, train.seq_len)  # of a block, beside the gradients of the block before
        scores = heads * rows * (train.seq_len * (FLOAT + narrow) + (train.seq_len - rows) * size)
        return scores + job.micro_tokens * (2 * queries * size + (4 if narrow else 2) * keys * FLOAT)
    if job.attention == "scores":
        return heads * train.seq_len**2 * (FLOAT + size)
    return job.micro_tokens * (2 * queries + 2 * (queries if job.repeats_heads else keys)) * size


@once_per_job
def postponed_block_bytes(job: Job) -> int:
    """Bytes that weight gradients of a block keep while they wait: inputs and output gradients of its linear layers.

    Row layers get gradients of the whole sequence, gathered over the tensor parallel ranks.
    """
    dimensions, inner = job.dimensions, -(-job.dimensions.intermediate_size // job.config.parallel.tp)
    queries, keys = job.local_heads * dimensions.head_size, job.local_kv_heads * dimensions.head_size
    inputs, grads = queries + inner, queries + 2 * keys + (2 if dimensions.gated else 1) * inner
    whole = job.micro_tokens * job.params_size
    return 2 * boundary_bytes(job) + (2 * dimensions.hidden_size + inputs + grads) * whole


@once_per_job
def kept_logits_bytes(job: Job) -> int:
    """Bytes that the loss keeps for backward: gradients of the hidden states, and of the matrix if it is trained."""
    rows = -(-job.dimensions.vocab_size // job.config.parallel.tp) if job.adapters is None else 0
    return (job.micro_tokens + rows) * job.dimensions.hidden_size * job.params_size


@once_per_job
def chunk_bytes(job: Job) -> int:
    """Bytes of the projection and loss beside what they keep, as `parallel/loss.py:_VocabCrossEntropy` allocates them.

    A chunk of logits exists in its own type, in float32, and as a gradient; in fp16 the scaled gradient is wide first.
    Several chunks sum the matrix's gradient in float32, and join the gradients of the hidden states.
    """
    size, hidden, tokens = job.params_size, job.dimensions.hidden_size, job.micro_tokens
    rows = -(-job.dimensions.vocab_size // job.config.parallel.tp)
    chunk = max(1, (job.config.train.loss_chunk_mib << 20) // (FLOAT * rows))
    padded = rows * job.config.parallel.tp > job.dimensions.vocab_size
    copies = FLOAT * (2 if padded else 1) if size == FLOAT else FLOAT + 2 * size
    if job.config.precision.params == "fp16":
        copies += FLOAT * (2 if padded else 1)
    if chunk >= tokens:
        return tokens * rows * copies
    summed = rows if job.adapters is None else 0
    return chunk * rows * copies + (tokens + summed) * hidden * size + summed * hidden * (FLOAT - size)
