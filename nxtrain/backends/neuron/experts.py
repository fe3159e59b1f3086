"""Choice of the expert kernels on Trainium with PyTorch/XLA. Importable without torch.

The choice is between blockwise kernels of the NKI Library and elementary operations. The conditions are assertions of
the kernels, and limits of the calls in `nxtrain.backends.neuron.blockwise`.

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
"""Neuron SDK release with the blockwise expert kernels."""
CORES = 2
"""Physical cores per logical core for which NeuronX Distributed calls the kernels."""
MIN_BLOCK_ROWS, MAX_BLOCK_ROWS = 256, 512
"""Rows of a block of tokens, for few and for many tokens per expert.

The forward kernel accepts multiples of 256, and the backward kernel 128 to 1024. NeuronX Distributed uses 512.
"""
HIDDEN_TILE, MOST_HIDDEN = 512, 8192
"""Divisor and largest value of the hidden size.

Source: `check_blockwise_mm_shard_I_kernel_compatibility`.
"""
WIDTH_TILE = 64
"""Divisor of an expert's intermediate size on a rank: 32 per core. Source: `validate_sharding`."""
MOST_TOKENS = 32768
"""Most tokens of a kernel call, by the documented usage of the forward kernel."""


def choose_experts(wanted: str, shape: ExpertShape, instance: Machine | None, sdk: SdkVersion | None) -> ExpertChoice:
    """Choose the NKI Library's blockwise expert kernels if they can run, or else elementary operations.

    Args:
        wanted: Value of `backend.experts`: `auto`, `blockwise` or `plain`.
        shape: Shape of the experts.
        instance: Instance type of this machine; None if unknown.
        sdk: Release of the Neuron SDK.

    Raises:
        ConfigError: `wanted` is `blockwise`, and the kernels cannot run.
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
    """Reasons why the blockwise expert kernels cannot run."""
    if instance is None or instance.target in FIRST_GENERATION or instance.physical_cores != CORES:
        yield f"they need {CORES} physical cores per logical core, as on Trn2"
    if sdk != SDK:
        yield f"they are those of Neuron SDK {SDK}, and this is {sdk or 'no known release'}"
    if shape.params != "bf16":
        yield f"they multiply in bf16, which precision.params={shape.params} does not ask for"
    if not shape.dropless:
        yield "they need model.moe_dispatch=dropless, and the run has capacity"
    if not shape.is_plain:
        yield "they do not support biases, clamped activations and adapters of experts"
    if shape.hidden_size % HIDDEN_TILE or shape.hidden_size > MOST_HIDDEN:
        sizes = f"a multiple of {HIDDEN_TILE} up to {MOST_HIDDEN:,}"
        yield f"the hidden size {shape.hidden_size:,} is not {sizes}"
    if shape.width % WIDTH_TILE:
        yield f"experts are {shape.width:,} wide on a rank, which is not a multiple of {WIDTH_TILE}"
    if shape.num_tokens > MOST_TOKENS:
        yield f"a rank has {shape.num_tokens:,} tokens in a call, and they support {MOST_TOKENS:,} at most"
