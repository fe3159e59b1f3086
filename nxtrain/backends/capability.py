"""Compute capabilities of NVIDIA GPUs that bf16 and float8 products need; importable without torch."""

from __future__ import annotations

AMPERE = (8, 0)
"""Lowest compute capability with bf16 matrix products.

Source: section "Compute Capabilities" of https://docs.nvidia.com/cuda/cuda-c-programming-guide.
"""


FLOAT8 = {"tensorwise": (8, 9), "rowwise": (9, 0), "mxfp8": (10, 0)}
"""Lowest compute capability of each recipe of `precision.fp8`: Ada, Hopper and Blackwell."""


def version(capability: tuple[int, int]) -> str:
    """Text of a compute capability, such as 9.0."""
    return ".".join(map(str, capability))


def bf16_warning(name: str, capability: tuple[int, int]) -> str:
    """Warning about bf16 on a GPU without bf16 products; empty if the GPU has them.

    Args:
        name: Name of the GPU.
        capability: Major and minor number of its compute capability.
    """
    if capability >= AMPERE:
        return ""
    return (
        f"warning: {name} has compute capability {version(capability)}, and products in bf16 need {version(AMPERE)} "
        "(Ampere); here they are emulated; use precision.params=fp16 or fp32, or a newer GPU"
    )
