"""Choice of the attention kernel on Trainium with PyTorch/XLA. Importable without torch.

The kernels are NKI's flash kernel, the NKI Library's kernels with key bounds, and elementary operations. The flash
kernel is called through NeuronX Distributed's `nki_flash_attn_func`. Its conditions are the assertions of this function
and of the kernels below it: src/neuronx_distributed/kernels/flash_attn.py in
https://github.com/aws-neuron/neuronx-distributed at fbac349 (v0.18); `flash_fwd` and `flash_attn_bwd`,
src/nki_samples/reference/attention.py in https://github.com/aws-neuron/nki-samples at 0898a77.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from nxtrain.backends.attention_choice import AttentionChoice, AttentionShape, choose_by, choose_mixed
from nxtrain.backends.limits import MAX_HEAD_SIZE, SEQUENCE_TILE
from nxtrain.backends.neuron.hardware import FIRST_GENERATION
from nxtrain.backends.neuron.sdk import RELEASES, Package, SdkVersion, unverified
from nxtrain.common.machines import Machine

LAST_SDK = SdkVersion(2, 29)
"""Last Neuron SDK whose compiler accepts NKI's flash kernel, which is written in `neuronxcc.nki`.

Source: release-notes/components/nki.rst, NKI 0.4.0 of SDK 2.30, in https://github.com/aws-neuron/aws-neuron-sdk.
"""

BOUNDED_SDK = SdkVersion(2, 29)
"""Neuron SDK release of the NKI Library's kernels with key bounds per query, which `bounded.py` calls."""

BOUNDED_TILE = 512
"""Divisor of the sequence length for the kernels with key bounds.

Source: `setup_config` in attention_bwd.py; see `bounded.py`.
"""
LONGEST_BOUNDED = 131072
"""Longest sequence, in tokens, of the kernels with key bounds. Source: `_MAX_SEQLEN` in attention_cte.py."""
MOST_BOUNDED_HEADS = 512
"""Most query heads of the kernels with key bounds. Source: `_MAX_BS` in attention_cte.py."""

BOUNDED = "the NKI Library's kernels with bounds"


def choose(
    wanted: str,
    shape: AttentionShape,
    instance: Machine | None,
    sdk: SdkVersion | None,
    distributed: Package | None,
    *,
    allow_unverified: bool = False,
) -> AttentionChoice:
    """Choose an attention kernel of Trainium that can run, or plain attention.

    Attention with documents or windows uses kernels with key bounds per query. Other attention uses NKI's flash
    kernel.

    Args:
        wanted: `auto`, `plain` or `flash`.
        shape: Shape of one rank's attention.
        instance: Instance type of this machine; None if unknown.
        sdk: Release of the Neuron SDK.
        distributed: Installed package neuronx-distributed.
        allow_unverified: Allow a release of NeuronX Distributed that nxtrain is not verified with.

    Raises:
        ConfigError: `wanted` is `flash`, and no kernel can run.
    """
    if shape.is_mixed:

        def own(alike: AttentionShape) -> AttentionChoice:
            return choose(wanted, alike, instance, sdk, distributed, allow_unverified=allow_unverified)

        return cast(AttentionChoice, choose_mixed(own, shape))
    cores = instance.physical_cores if instance else 1
    obstacles = [*_lacking(instance, sdk, distributed, allow_unverified), *_misfits(shape, instance)]
    if shape.limits and wanted != "plain":
        against = list(_unbounded(shape, instance, sdk))
        if not against:
            reason = f"{'; '.join(shape.limits)}, by {BOUNDED} of keys per query, Neuron SDK {sdk}"
            return AttentionChoice("bounded", f"{reason}, a call for each sequence of a micro-batch", cores)
        obstacles.insert(0, f"{BOUNDED} cannot be had: {'; '.join(against)}")
    version = distributed.version if distributed else ""
    flash = AttentionChoice("flash", f"NKI's kernel of neuronx-distributed {version}, Neuron SDK {sdk}", cores)
    return choose_by("neuron", wanted, shape, obstacles, flash, "NKI's kernel")


def _lacking(
    instance: Machine | None, sdk: SdkVersion | None, distributed: Package | None, allow_unverified: bool
) -> Iterator[str]:
    if instance is None:
        yield "this machine is not a Trainium instance that nxtrain knows"
    if sdk is None:
        yield "no known release of the Neuron SDK is installed"
    elif sdk > LAST_SDK:
        yield f"the compiler of Neuron SDK {sdk} refuses NKI kernels of the old namespace, unlike that of {LAST_SDK}"
    if distributed is None:
        version = f" {RELEASES[sdk].neuronx_distributed}" if sdk else ""
        yield f"neuronx-distributed{version}, which calls NKI's kernel, is not installed"
    elif distributed.placeholder:
        yield f"neuronx-distributed {distributed.version} is PyPI's empty placeholder"
    elif not allow_unverified and unverified(distributed):
        yield f"{unverified(distributed)}: use a release of those, or backend.allow_unverified=true"


def _misfits(shape: AttentionShape, instance: Machine | None) -> Iterator[str]:
    if shape.params != "bf16":
        yield f"NKI's kernel multiplies in bf16, which precision.params={shape.params} does not ask for"
    if shape.seq_len % SEQUENCE_TILE:
        yield f"train.seq_len={shape.seq_len} is not a multiple of {SEQUENCE_TILE}, as NKI's kernel needs"
    if shape.head_size > MAX_HEAD_SIZE:
        yield f"heads are {shape.head_size} wide, and NKI's kernel takes {MAX_HEAD_SIZE} at most"
    if instance is not None and shape.num_heads % instance.physical_cores:
        cores = instance.physical_cores
        yield f"{shape.num_heads} query heads per rank do not divide over the {cores} physical cores of a logical one"


def _unbounded(shape: AttentionShape, instance: Machine | None, sdk: SdkVersion | None) -> Iterator[str]:
    """Reasons why the NKI Library's kernels with key bounds cannot be used."""
    if shape.cp > 1:
        yield f"parallel.cp={shape.cp} shares the positions of a sequence, and they take whole rows"
    if instance is None or instance.target in FIRST_GENERATION:
        yield "they select ranges by an instruction of Trn2"
    if sdk != BOUNDED_SDK:
        yield f"they are those of Neuron SDK {BOUNDED_SDK}, and this is {sdk or 'no known release'}"
    yield from misfits_of_bounded(shape, shape.num_heads)


def misfits_of_bounded(shape: AttentionShape, num_heads: int) -> Iterator[str]:
    """Reasons why the attention shape does not fit the kernels with key bounds.

    Args:
        shape: Shape of one rank's attention.
        num_heads: Query heads of a kernel call.
    """
    if shape.params != "bf16":
        yield f"they multiply in bf16, which precision.params={shape.params} does not ask for"
    if shape.seq_len % BOUNDED_TILE or shape.seq_len > LONGEST_BOUNDED:
        yield f"train.seq_len={shape.seq_len} is not a multiple of {BOUNDED_TILE} up to {LONGEST_BOUNDED:,}"
    if shape.head_size > MAX_HEAD_SIZE:
        yield f"heads are {shape.head_size} wide, and they take {MAX_HEAD_SIZE} at most"
    if num_heads > MOST_BOUNDED_HEADS:
        yield f"{num_heads} query heads per rank, and they take {MOST_BOUNDED_HEADS} at most"
