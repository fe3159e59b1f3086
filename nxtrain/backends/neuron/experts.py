"""Choice of the products of experts on PyTorch/XLA: kernels of the NKI Library or operations. Importable without torch.

The conditions are assertions of the kernels, and limits of the calls in `nxtrain.backends.neuron.blockwise`.

Source: `check_blockwise_mm_shard_I_kernel_compatibility` in src/nkilib_src/nkilib/core/moe/moe_cte/bwmm_shard_on_I.py,
and `validate_sharding` in experimental/moe/bwd/moe_bwd_parameters.py, in https://github.com/aws-neuron/nki-library at
d2ad3a5, its tag 2.29.
"""

from __future__ import annotations

from collections.abc import Iterator

from nxtrain.backends.expert_choice import ExpertChoice, ExpertShape
from nxtrain.backends.neuron.hardware import FIRST_GENERATION
from nxtrain.backends.neuron.sdk import SdkVersion
from nxtrain.common.errors import ConfigError, Problem
from nxtrain.common.machines import Machine

SDK = SdkVersion(2, 29)
"""Release of the Neuron SDK that has the kernels."""
CORES = 2
"""Physical cores of a logical core, as NeuronX Distributed calls the kernels."""
MIN_BLOCK_ROWS, MAX_BLOCK_ROWS = 256, 512
"""Rows of a block for few and for many slots.

The kernels take multiples of 256 forward, and 128 to 1024 backward. NeuronX Distributed takes 512.
"""
HIDDEN_TILE, MOST_HIDDEN = 512, 8192
"""Divisor of the hidden size, and its largest value. Source: `check_blockwise_mm_shard_I_kernel_compatibility`."""
WIDTH_TILE = 64
"""Divisor of the intermediate size of a rank: 32 for each core. Source: `validate_sharding`."""
MOST_TOKENS = 32768
"""Most tokens of a call, by the documented usage of the forward kernel."""


def choose_experts(wanted: str, shape: ExpertShape, instance: Machine | None, sdk: SdkVersion | None) -> ExpertChoice:
    """Choose the NKI Library's kernels for experts where they can run, or else products by operations.

    Args:
        wanted: Value of `backend.experts`: `auto`, `blockwise` or `plain`.
        shape: Shape of the experts.
        instance: Kind of this machine; None if unknown.
        sdk: Release of the Neuron SDK.

    Raises:
        ConfigError: The kernels are wanted and cannot run.
    """
    if wanted == "plain":
        return ExpertChoice("plain", "as configured")
    against = list(_obstacles(shape, instance, sdk))
    if not against:
        return ExpertChoice("blockwise", f"by kernels of the NKI Library, Neuron SDK {sdk}")
    reason = f"the NKI Library's kernels cannot be had: {'; '.join(against)}"
    if wanted == "blockwise":
        raise ConfigError([Problem("backend.experts", f"blockwise, but {reason}", hint="use auto or plain")])
    return ExpertChoice("plain", reason)


def _obstacles(shape: ExpertShape, instance: Machine | None, sdk: SdkVersion | None) -> Iterator[str]:
    """Reasons why the kernels cannot run."""
    if instance is None or instance.target in FIRST_GENERATION or instance.physical_cores != CORES:
        yield f"they share their work between the {CORES} physical cores of a logical one, as on Trn2"
    if sdk != SDK:
        yield f"they are those of Neuron SDK {SDK}, and this is {sdk or 'no known release'}"
    if shape.params != "bf16":
        yield f"they multiply in bf16, which precision.params={shape.params} does not ask for"
    if not shape.dropless:
        yield "model.moe_dispatch=capacity has blocks of another kind"
    if not shape.is_plain:
        yield "biases, clamped units and adapters of experts have products of their own"
    if shape.hidden_size % HIDDEN_TILE or shape.hidden_size > MOST_HIDDEN:
        sizes = f"a multiple of {HIDDEN_TILE} up to {MOST_HIDDEN:,}"
        yield f"the hidden size {shape.hidden_size:,} is not {sizes}"
    if shape.width % WIDTH_TILE:
        yield f"experts are {shape.width:,} wide on a rank, which is no multiple of {WIDTH_TILE}"
    if shape.num_tokens > MOST_TOKENS:
        yield f"a rank has {shape.num_tokens:,} tokens in a call, and they are made for {MOST_TOKENS:,} at most"
