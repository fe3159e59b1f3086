"""Predicted memory and traffic of mixture-of-experts layers: router tensors, expert rows, and the exchange of rows.

Counts follow `nn/mixture.py`, `parallel/dispatch.py` and `parallel/experts.py`. Routers are assumed to balance the
load, as their losses train them to. Then each rank's experts compute as many rows as the rank has slots (token-expert
pairs).
"""

from __future__ import annotations

from nxtrain.plan.adapters import expert_adapters
from nxtrain.plan.job import SIZES, Job, once_per_job

FLOAT, INDEX = SIZES["fp32"], 8
"""Bytes of a router's number, and of the index of a slot (token-expert pair)."""


def expert_tensors(job: Job) -> list[tuple[str, str, int]]:
    """Tensors that autograd saves for the feed-forward of a block with experts; empty without experts."""
    mixture, hidden = job.dimensions.mixture, job.dimensions.hidden_size
    if mixture is None:
        return []
    tokens, k = job.sequence_rows, mixture.experts_per_token
    kept = [("gate", "input", tokens * hidden * job.params_size)]
    if job.params_size != FLOAT:
        kept.append(("gate", "input in float32", tokens * hidden * FLOAT))
    # Logits and probabilities; indices, and the weights before and after their sum becomes 1.
    chosen = INDEX + (2 * FLOAT if mixture.is_normalized else 0)
    kept.append(("gate", "logits and probabilities", 2 * tokens * mixture.num_experts * FLOAT))
    kept.append(("gate", "experts of each token", tokens * k * chosen))
    kept.append(("experts", "rows", job.slots * hidden * job.params_size))
    kept.append(("experts", "gate and up", 2 * job.slots * job.inner_width * job.params_size))
    kept.append(("experts", "slots and weights", job.slots * (INDEX + FLOAT)))
    num_adapters = _num_adapters(job)
    if num_adapters:
        columns = num_adapters * 2 * job.slots * job.config.finetune.r
        kept.append(("experts", "columns of adapters", columns * job.params_size))
    # Autograd keeps the intermediate tensors between the products.
    between = 0
    if mixture.limit is not None:
        between = 5
    elif num_adapters:
        between = 2 + job.config.finetune.targets.count("experts.down_proj")
    if between:
        hidden_rows = between * job.slots * job.inner_width
        kept.append(("experts", "unit and inputs of the last product", hidden_rows * job.params_size))
    if mixture.biases:
        own = mixture.num_experts // job.config.parallel.ep
        kept.append(("experts", "biases of the rows", job.slots * (hidden + 2 * own) * job.params_size))
    return kept


def _num_adapters(job: Job) -> int:
    """Number of adapters of an expert."""
    if job.adapters is None:
        return 0
    return len(expert_adapters(job.stages[0], job.config.parallel.tp, job.adapters))


@once_per_job
def expert_work_bytes(job: Job) -> int:
    """Bytes of temporary tensors in the backward pass of experts: gradients of rows and matrices, and intermediates.

    The gradients of all expert matrices of the block exist at once, in addition to the sums of earlier micro-batches.
    """
    mixture = job.dimensions.mixture
    if mixture is None:
        return 0
    experts = mixture.num_experts // job.config.parallel.ep
    rows = 2 * job.slots * job.dimensions.hidden_size
    between = 8 * job.slots * job.inner_width  # gate, values and their gradients, and four products of both
    if _num_adapters(job) or mixture.limit is not None:
        between = 3 * job.slots * job.inner_width  # the other intermediates are kept already
    matrices = 0
    if job.num_micro > 1 and job.adapters is None:
        matrices = 3 * experts * job.inner_width * job.dimensions.hidden_size
    return (rows + between + matrices) * job.params_size


@once_per_job
def expert_forward_bytes(job: Job) -> int:
    """Bytes of an expert layer's forward pass without saved tensors: rows, projections, gates, outputs, and sums."""
    rows = job.slots * job.dimensions.hidden_size
    return (3 * rows + 4 * job.slots * job.inner_width) * job.params_size


def exchange_bytes(job: Job, num_blocks: int) -> tuple[float, float]:
    """Bytes that a rank sends over ep for one micro-batch through some blocks, in the forward and in the backward pass.

    The forward pass sends rows to the ranks of their experts, and outputs back. The backward pass sends the gradients
    of both. A recomputed block repeats the forward exchange. Each tensor parallel rank exchanges whole rows. The counts
    of rows are small and are not included.
    """
    parallel = job.config.parallel
    if parallel.ep == 1:
        return 0.0, 0.0
    rows = job.slots * job.dimensions.hidden_size * job.params_size * (parallel.ep - 1) / parallel.ep
    repeats = 4 if job.config.train.remat == "full" else 2
    return num_blocks * 2 * rows, num_blocks * repeats * rows
