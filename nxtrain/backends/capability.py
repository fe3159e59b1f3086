"""Compute capability of NVIDIA GPUs, as far as number types depend on it; importable without torch."""

from __future__ import annotations

AMPERE = (8, 0)
"""First compute capability with bf16 products.

Source: section "Compute Capabilities" of https://docs.nvidia.com/cuda/cuda-c-programming-guide.
"""


def bf16_warning(name: str, capability: tuple[int, int]) -> str:
    """Warning about bf16 on a GPU without bf16 products; empty if the GPU has them.

    Args:
        name: Name of the GPU.
        capability: Major and minor number of its compute capability.
    """
    if capability >= AMPERE:
        return ""
    found, needed = (".".join(map(str, version)) for version in (capability, AMPERE))
    return (
        f"warning: {name} has compute capability {found}, and products in bf16 need {needed} (Ampere); here they are "
        "emulated; use precision.params=fp16 or fp32, or a newer GPU"
    )
