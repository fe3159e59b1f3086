"""Choice of attention on PyTorch/XLA: NKI's flash kernel or elementary operations. Importable without torch.

The kernel is that of NeuronX Distributed's `nki_flash_attn_func`. The conditions are the assertions of this function
and of the kernels that it calls: src/neuronx_distributed/kernels/flash_attn.py in
https://github.com/aws-neuron/neuronx-distributed at fbac349 (v0.18); `flash_fwd` and `flash_attn_bwd`,
src/nki_samples/reference/attention.py in https://github.com/aws-neuron/nki-samples at 0898a77.
"""

from __future__ import annotations

from collections.abc import Iterator

from nxtrain.backends.attention_choice import AttentionChoice, AttentionShape, choose_by
from nxtrain.backends.limits import MAX_HEAD_SIZE, SEQUENCE_TILE
from nxtrain.backends.neuron.sdk import RELEASES, Package, SdkVersion, unverified
from nxtrain.common.machines import Machine

LAST_SDK = SdkVersion(2, 29)
"""Last release of the SDK whose compiler accepts this kernel, since it is written in `neuronxcc.nki`.

Source: release-notes/components/nki.rst, NKI 0.4.0 of SDK 2.30, in https://github.com/aws-neuron/aws-neuron-sdk.
"""


def choose(
    wanted: str,
    shape: AttentionShape,
    instance: Machine | None,
    sdk: SdkVersion | None,
    distributed: Package | None,
    *,
    allow_unverified: bool = False,
) -> AttentionChoice:
    """Choose the flash kernel if it can run, unless plain attention is wanted.

    Args:
        wanted: `auto`, `plain` or `flash`.
        shape: Shape of the attention.
        instance: Kind of this machine; None if unknown.
        sdk: Release of the Neuron SDK.
        distributed: Installed package neuronx-distributed.
        allow_unverified: Allow a release that nxtrain is not verified with.

    Raises:
        ConfigError: The flash kernel is wanted and cannot run.
    """
    obstacles = [*_lacking(instance, sdk, distributed, allow_unverified), *_misfits(shape, instance)]
    version, cores = (distributed.version if distributed else ""), (instance.physical_cores if instance else 1)
    flash = AttentionChoice("flash", f"NKI's kernel of neuronx-distributed {version}, Neuron SDK {sdk}", cores)
    return choose_by("neuron", wanted, shape, obstacles, flash, "NKI's kernel")


def _lacking(
    instance: Machine | None, sdk: SdkVersion | None, distributed: Package | None, allow_unverified: bool
) -> Iterator[str]:
    if instance is None:
        yield "this machine is no Trainium instance that nxtrain knows"
    if sdk is None:
        yield "no known release of the Neuron SDK is installed"
    elif sdk > LAST_SDK:
        yield f"the compiler of Neuron SDK {sdk} refuses NKI kernels of the old namespace, unlike that of {LAST_SDK}"
    if distributed is None:
        version = f" {RELEASES[sdk].neuronx_distributed}" if sdk else ""
        yield f"neuronx-distributed{version}, which calls NKI's kernel, is not installed"
    elif distributed.placeholder:
        yield f"neuronx-distributed {distributed.version} is PyPI's empty placeholder"
    elif not allow_unverified and (why := unverified(distributed)):
        yield f"{why}: use a release of those, or backend.allow_unverified=true"


def _misfits(shape: AttentionShape, instance: Machine | None) -> Iterator[str]:
    if shape.params != "bf16":
        yield f"NKI's kernel multiplies in bf16, which precision.params={shape.params} does not ask for"
    if shape.seq_len % SEQUENCE_TILE:
        yield f"train.seq_len={shape.seq_len} is no multiple of {SEQUENCE_TILE}, as NKI's kernel needs"
    if shape.head_size > MAX_HEAD_SIZE:
        yield f"heads are {shape.head_size} wide, and NKI's kernel takes {MAX_HEAD_SIZE} at most"
    if instance is not None and shape.num_heads % instance.physical_cores:
        cores = instance.physical_cores
        yield f"{shape.num_heads} query heads per rank do not divide over the {cores} physical cores of a logical one"
