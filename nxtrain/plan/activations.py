"""Predicted activation memory: bytes that autograd saves for one micro-batch, and a layer's largest temporary tensors.

`kept_tensors` lists the tensors that autograd saves for a block. A view keeps its whole base alive, so keys that share
a matrix with queries keep both. `nxtrain plan --trace` compares the sums with a real step.
"""

from __future__ import annotations

from collections.abc import Sequence

from nxtrain.backends.limits import CPU_BLOCK, LONG_SEQUENCE, block_rows
from nxtrain.common.sharding import ShardSpec
from nxtrain.plan.adapters import AdaptedLayer, adapted_layers
from nxtrain.plan.context import backward_context_bytes, forward_context_bytes, row_sums_bytes
from nxtrain.plan.experts import expert_forward_bytes, expert_tensors, expert_work_bytes
from nxtrain.plan.float8 import product_bytes
from nxtrain.plan.job import SIZES, Job, once_per_job
from nxtrain.plan.shapes import sum_entries

FLOAT = SIZES["fp32"]

Tensors = list[tuple[str, str, int]]
"""Saved tensors in the order of the forward pass: layer that saves the tensor, description, and bytes."""

ATTENTION_IN = ("qkv_proj", "q_proj", "k_proj", "v_proj")
ATTENTION_OUT = ("o_proj",)
MLP_IN = ("gate_up_proj", "gate_proj", "up_proj")
MLP_OUT = ("down_proj",)
"""Names of linear layers in groups that share an input, fused or not."""

RECOMPUTED = "recomputed feed-forward"


@once_per_job
def block_bytes(job: Job) -> int:
    """Bytes of activations that autograd saves for one block, from its forward to its backward pass."""
    remat = job.config.train.remat
    if remat == "full":
        return boundary_bytes(job)
    return _total(kept_tensors(job, remat))


@once_per_job
def boundary_bytes(job: Job) -> int:
    """Bytes of the residual stream between two layers, for one micro-batch on one rank."""
    return job.sequence_rows * job.dimensions.hidden_size * job.params_size


def kept_tensors(job: Job, remat: str) -> Tensors:
    """Tensors that autograd saves for backward in one block.

    Args:
        job: The run.
        remat: `none`, or `selective`, which recomputes the attention kernel and feed-forwards of long sequences.
    """
    stream = boundary_bytes(job)
    row_roots = job.sequence_rows * FLOAT
    kept = [("input_layernorm", "input", stream), ("input_layernorm", "root of each row", row_roots)]
    kept += _linear_tensors(job, ATTENTION_IN, stream)
    kept += _attention_tensors(job, recomputed=remat == "selective")
    kept += [("post_attention_layernorm", "input", stream), ("post_attention_layernorm", "root of each row", row_roots)]
    if num_chunks(job) > 1:
        kept += [(RECOMPUTED, "input", stream), *_entered_tensors(job)]
    elif remat == "selective" and _is_long(job):
        kept.append((RECOMPUTED, "input", stream))
    else:
        if job.dimensions.mixture is None:
            kept += _linear_tensors(job, MLP_IN, stream)
        kept += _mlp_tensors(job)
    return kept


def _linear_tensors(job: Job, names: tuple[str, ...], size: int) -> Tensors:
    """Tensors saved by linear layers that share one input: the input, and the tensors that adapters save.

    Adapters save the input after dropout with a mask byte per entry, and their low-rank columns.

    Args:
        job: The run.
        names: Names of the layers.
        size: Bytes of the input.
    """
    kept = []
    if _keeps_input(job, names):
        kept.append((names[0], "input", size))
    for layer in _adapted(job, names):
        if job.config.finetune.dropout:
            kept.append((names[0], "input after dropout, and its mask", size + size // job.params_size))
        tokens = job.micro_tokens if layer.is_column else job.sequence_rows
        kept.append((names[0], "columns of adapters", layer.width * tokens * job.params_size))
    return kept


def _attention_tensors(job: Job, *, recomputed: bool) -> Tensors:
    """Tensors saved by attention: queries, keys and values, the kernel's own tensors, and the output.

    The output is also saved by the row layer that follows. Head norms save their inputs and one number per head. With
    head norms, queries and keys are rotated separately.
    """
    queries, keys = job.query_width, job.key_width
    fused, normed = job.config.model.fused_qkv, job.dimensions.head_norms
    rotated = queries + keys
    value = keys
    if fused:
        value = queries + 2 * keys
    repeats = job.local_heads // job.local_kv_heads
    one_is_a_view = 1 in (repeats, job.local_kv_heads)
    if recomputed or not job.repeats_heads or one_is_a_view:
        inputs = rotated + value
        if normed and not fused:
            inputs += rotated
    else:
        # Repeated K/V heads are kept. Of the inputs, only the queries and the tensor that they are a view of are kept.
        inputs = 3 * queries
        if fused and not normed:
            inputs += keys
        if normed:
            inputs += value if fused else rotated
    kept = [("attention", "queries, keys and values", inputs * job.micro_tokens * job.params_size)]
    if normed:
        heads = job.local_heads + job.local_kv_heads
        kept.append(("q_norm and k_norm", "root of each head", heads * job.micro_tokens * FLOAT))
    output = queries * job.micro_tokens * job.params_size
    if not recomputed:
        kept.append(("attention", "numbers of the kernel", _kernel_bytes(job)))
        kernel_keeps_output = job.attention in ("fused", "grouped", "blocked")
        if kernel_keeps_output and not _keeps_input(job, ATTENTION_OUT):
            kept.append(("attention", "output", output))
    return kept + _linear_tensors(job, ATTENTION_OUT, output)


def _kernel_bytes(job: Job) -> int:
    """Bytes that the attention kernel saves for backward, except its inputs and its output."""
    train = job.config.train
    heads = train.micro_batch * job.local_heads
    if job.config.parallel.cp > 1:
        return row_sums_bytes(job)
    if job.attention == "probabilities":  # probabilities of blocks of queries against the keys before them
        entries = 0
        for start in range(0, train.seq_len, CPU_BLOCK):
            end = min(start + CPU_BLOCK, train.seq_len)
            entries += (end - start) * end
        return heads * entries * job.params_size
    if job.attention == "scores":  # probabilities, and the masked scores from which a compiler may not free them
        return 2 * heads * train.seq_len**2 * job.params_size
    row_sums = heads * train.seq_len * FLOAT
    return row_sums


def _mlp_tensors(job: Job) -> Tensors:
    if job.dimensions.mixture is not None:
        return expert_tensors(job)
    size = _product_bytes(job)
    kept = [("mlp", "up", size)]
    if job.dimensions.gated:
        kept.append(("mlp", "gate", size))
        if not job.config.model.fused_gate_up:
            kept.append(("mlp", "silu of the gate", size))
    return kept + _linear_tensors(job, MLP_OUT, size)


def _entered_tensors(job: Job) -> Tensors:
    """Adapter columns saved by a feed-forward in chunks: outputs of A at the input, and sums at the output."""
    kept = []
    for names, tokens in ((MLP_IN, job.micro_tokens), (MLP_OUT, job.sequence_rows)):
        for layer in _adapted(job, names):
            kept.append((RECOMPUTED, "columns of adapters", layer.width * tokens * job.params_size))
    return kept


def _product_bytes(job: Job) -> int:
    """Bytes of the input of the feed-forward's row layer, the down projection."""
    return job.inner_width * job.micro_tokens * job.params_size


def _total(tensors: Tensors) -> int:
    total = 0
    for _, _, size in tensors:
        total += size
    return total


def _adapted(job: Job, names: Sequence[str]) -> list[AdaptedLayer]:
    """Layers of a block that have adapters and one of the given names."""
    if job.adapters is None:
        return []
    layers = adapted_layers(job.stages[0], job.config.parallel.tp, job.adapters)
    return [layer for layer in layers if layer.name in names]


def _keeps_input(job: Job, names: Sequence[str]) -> bool:
    """True if one of the layers saves its input unchanged, for its trained weight or an adapter without dropout."""
    if job.adapters is None:
        return True
    return not job.config.finetune.dropout and bool(_adapted(job, names))


@once_per_job
def untracked_bytes(job: Job) -> int:
    """Bytes of activations that the model's first block need not save, since gradients begin at the first adapter."""
    remat = job.config.train.remat
    if remat == "full":
        return 0
    return _untracked_bytes(job, remat)


def _untracked_bytes(job: Job, remat: str) -> int:
    if job.adapters is None:
        return 0
    groups = {names[0]: names for names in (ATTENTION_IN, ATTENTION_OUT, MLP_IN, MLP_OUT)}
    size = 0
    for layer, _, num_bytes in kept_tensors(job, remat):
        if layer == RECOMPUTED:
            return size
        adapted = _adapted(job, groups.get(layer, ()))
        if adapted and layer == MLP_IN[0] and len(adapted) == 1:
            # Unfused, a frozen gate keeps no input of its activation, and with another frozen part no result is kept.
            frozen_parts = {"up_proj": 2, "gate_proj": 1}
            return size + frozen_parts.get(adapted[0].name, 0) * _product_bytes(job)
        if adapted:
            return size
        size += num_bytes
    return size


@once_per_job
def working_bytes(job: Job) -> int:
    """Bytes of the largest temporary tensors in the backward pass of any layer of a block.

    In the feed-forward these are the gradients of the product, of the gate, of both together, and a factor. Unfused,
    they are the gradients of the product and of both parts. The product itself is free by then. Backward recomputes one
    part at a time.
    """
    remat = job.config.train.remat
    mlp, attention = max(_mlp_work_bytes(job), product_bytes(job)), attention_work_bytes(job)
    mlp_kept = _total(_mlp_tensors(job))
    if remat == "selective":
        attention += _total(_attention_tensors(job, recomputed=False))
        attention -= _total(_attention_tensors(job, recomputed=True))
        if num_chunks(job) > 1:
            return max(_chunk_work_bytes(job), attention)
        if _is_long(job):
            return max(mlp + mlp_kept, attention)
    elif num_chunks(job) > 1:
        kept = _total(kept_tensors(job, "none")) - boundary_bytes(job)
        return max(_chunk_work_bytes(job), attention, norm_work_bytes(job)) + kept
    # The feed-forward's tensors are free by then, but postponed weight gradients keep as many.
    later = max(attention, norm_work_bytes(job))
    if job.postpones:
        later += boundary_bytes(job)
    else:
        later -= mlp_kept
    work = max(mlp, later)
    if remat == "full":
        work += _total(kept_tensors(job, "none")) - boundary_bytes(job)
    return work


@once_per_job
def num_chunks(job: Job) -> int:
    """Number of sequence chunks in which feed-forwards are recomputed, as `nn/mlp.py` decides."""
    config = job.config
    is_whole = config.train.remat == "none" or job.postpones or config.compile.torch_compile or job.has_nxd_layers
    is_whole = is_whole or config.precision.fp8 != "none"
    if is_whole or (config.finetune.dropout and _adapted(job, (*MLP_IN, *MLP_OUT))):
        return 1
    return -(-job.local_len // LONG_SEQUENCE)


@once_per_job
def _chunk_work_bytes(job: Job) -> int:
    """Bytes of the largest temporary tensors in the backward pass of a feed-forward computed in chunks.

    Allocations follow `parallel/chunks.py`. Float32 sums of parameter gradients exist in addition to the gradients of a
    chunk. Sequence parallelism gathers the input and the gradient. At the end, the input gradients of all chunks are
    concatenated, and parameter gradients are cast to their type.
    """
    length = -(-job.local_len // num_chunks(job))
    in_chunk = (_mlp_work_bytes(job) + _total(_mlp_tensors(job))) * length // job.local_len
    whole = job.micro_tokens * job.dimensions.hidden_size * job.params_size
    gathered = 0
    if job.config.parallel.sequence_parallel:
        gathered = 2 * whole
    trained = _mlp_params(job)
    sums, narrow = trained * FLOAT, 0
    if job.params_size < FLOAT:
        narrow = trained * job.params_size
    return sums + gathered + max(in_chunk + whole, narrow + 2 * whole)


def _mlp_params(job: Job) -> int:
    """Number of trained parameters of a feed-forward on a rank, unsharded over data parallel ranks."""
    specs: dict[str, ShardSpec] = {}
    if job.adapters is None:
        block = job.stages[0].block_specs(job.config.parallel.tp)
        specs |= {name: spec for name, spec in block.items() if name.startswith("mlp.")}
    for layer in _adapted(job, (*MLP_IN, *MLP_OUT)):
        specs |= layer.specs()
    return sum_entries(specs, job.config.parallel.tp, 1).local


def _mlp_work_bytes(job: Job) -> int:
    if job.dimensions.mixture is not None:
        return expert_work_bytes(job)
    tensors = 2
    if job.dimensions.gated:
        tensors = 5 if job.config.model.fused_gate_up else 3
        if _keeps_input(job, MLP_OUT) and not job.postpones:
            tensors -= 1
    return tensors * _product_bytes(job)


@once_per_job
def first_working_bytes(job: Job) -> int:
    """Bytes of the largest temporary tensors in the first block's backward pass, which ends at its first adapter."""
    remat = job.config.train.remat
    is_recomputed = num_chunks(job) > 1 or (remat == "selective" and _is_long(job))
    if job.adapters is None or _adapted(job, ATTENTION_IN) or is_recomputed:
        return working_bytes(job)
    work = boundary_bytes(job)
    if _adapted(job, ATTENTION_OUT):
        work = max(_mlp_work_bytes(job), norm_work_bytes(job) - _total(_mlp_tensors(job)))
    elif _adapted(job, MLP_IN):
        work = _mlp_work_bytes(job)
    if remat != "full":
        return work
    kept = _total(kept_tensors(job, "none")) - _untracked_bytes(job, "none")
    return max(work + kept, forward_working_bytes(job) - boundary_bytes(job))


@once_per_job
def forward_working_bytes(job: Job) -> int:
    """Bytes of a block's forward pass that saves nothing: largest temporary tensors, residual stream, and norm output.

    In the feed-forward these are gate, up, and their product. In attention they are queries, keys and values before and
    after rotation, the output, and the kernel's workspace. Layers with adapters hold their result three times: of the
    matrix, of the adapters, and the sum. Fused layers hold the result of each adapter and the stacked results before
    the sum.
    """
    train = job.config.train
    size = job.params_size
    tokens = job.micro_tokens
    queries, keys = job.query_width, job.key_width
    heads = train.micro_batch * job.local_heads
    attention = 3 * (queries + keys) * tokens * size + _kernel_bytes(job)
    if job.config.parallel.cp > 1:
        attention += forward_context_bytes(job)
    elif (
        job.attention == "probabilities"
    ):  # keys in float32, scores before and after softmax, and copies with the heads first
        rows = min(CPU_BLOCK, train.seq_len)
        attention += keys * FLOAT * tokens + 2 * heads * rows * train.seq_len * FLOAT
        if train.micro_batch > 1:  # of one sequence the copies are views
            attention += (queries + 2 * keys) * size * tokens
    elif job.attention == "blocked":
        attention += _blocks_work_bytes(job, scores=1)
    elif job.repeats_heads and job.local_heads > job.local_kv_heads > 1:
        attention += 2 * queries * tokens * size
    elif job.attention == "scores":
        attention += heads * train.seq_len**2 * FLOAT
    parts = 3 if job.dimensions.gated else 2
    if _adapted(job, MLP_IN):
        is_stack = job.config.model.fused_gate_up and job.dimensions.gated
        parts = 6 if is_stack else 4
    mlp = parts * _product_bytes(job)
    if job.dimensions.mixture is not None:
        mlp = expert_forward_bytes(job)
    return 2 * boundary_bytes(job) + max(attention, mlp)


def _blocks_work_bytes(job: Job, scores: int) -> int:
    """Bytes of blockwise attention: copies with the heads first, float32 outputs of all blocks, and one block's scores.

    Args:
        job: The run.
        scores: Number of float32 tensors with the scores of a block.
    """
    train, size = job.config.train, job.params_size
    queries, keys = job.query_width * job.micro_tokens, job.key_width * job.micro_tokens
    heads = train.micro_batch * job.local_heads
    rows = min(block_rows(heads, train.seq_len), train.seq_len)
    num_keys = train.seq_len
    if job.block_window is not None:
        num_keys = min(num_keys, job.block_window + rows - 1)
    entry = scores * FLOAT
    if size < FLOAT:
        entry += size
    copies = 0
    if train.micro_batch > 1:  # of one sequence the copies are views
        copies = (scores * queries + 2 * keys) * size
    # Results of blocks are put together, and then laid out as the input; the scores are free by then.
    return copies + queries * FLOAT + max(2 * queries * FLOAT, heads * rows * num_keys * entry)


def _is_long(job: Job) -> bool:
    return job.config.train.seq_len >= LONG_SEQUENCE


@once_per_job
def norm_work_bytes(job: Job) -> int:
    """Bytes of a norm's backward pass in float32: two products, their difference, the result, and a wide gradient."""
    tensors = 4 if job.params_size == FLOAT else 5
    return tensors * job.sequence_rows * job.dimensions.hidden_size * FLOAT


@once_per_job
def attention_work_bytes(job: Job) -> int:
    """Bytes of attention's backward pass: gradients of q, k and v; without a fused kernel also scores in two types."""
    train, size = job.config.train, job.params_size
    queries, keys = job.query_width, job.key_width
    heads = train.micro_batch * job.local_heads
    if job.config.parallel.cp > 1:
        return backward_context_bytes(job)
    if job.attention == "probabilities":
        rows = min(CPU_BLOCK, train.seq_len)  # of a block, in addition to the gradients of the block before
        scores = train.seq_len * FLOAT + (train.seq_len - rows) * size
        key_grads = 2 * keys * FLOAT
        if size < FLOAT:
            scores += train.seq_len * size
            key_grads *= 2
        return heads * rows * scores + job.micro_tokens * (2 * queries * size + key_grads)
    if job.attention == "scores":
        return heads * train.seq_len**2 * (FLOAT + size)
    if job.attention == "blocked":
        key_grads = 2 * keys * (FLOAT + size)
        return _blocks_work_bytes(job, scores=2) + job.micro_tokens * (2 * queries * size + key_grads)
    key_copies = queries if job.repeats_heads else keys
    return job.micro_tokens * 2 * (queries + key_copies) * size


@once_per_job
def postponed_block_bytes(job: Job) -> int:
    """Bytes that postponed weight gradients of a block keep: inputs and output gradients of its linear layers.

    Row layers keep gradients of the whole sequence, gathered over the tensor parallel ranks.
    """
    queries = job.query_width
    keys = job.key_width
    inner = job.inner_width
    ups = 2 * inner if job.dimensions.gated else inner
    row_inputs = queries + inner
    column_grads = queries + 2 * keys + ups
    row_grads = 2 * job.dimensions.hidden_size
    per_token = (row_inputs + column_grads + row_grads) * job.params_size
    return 2 * boundary_bytes(job) + job.micro_tokens * per_token
