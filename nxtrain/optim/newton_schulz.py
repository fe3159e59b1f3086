"""Newton-Schulz iteration, by which Muon replaces the singular values of a matrix by numbers near one."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients a, b, c of the polynomial a x + b x^3 + c x^5, steepest at zero among those that stay near one."""

EPS = 1e-7
"""Smallest norm by which a matrix is divided."""


def orthogonalize(x: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Apply the polynomial `steps` times to the singular values of a matrix over its norm; singular vectors stay.

    Five steps bring singular values above 2e-3 of the norm to between 0.68 and 1.21. A matrix of zeros stays zero.

    Args:
        x: (R, C) float32, or float64 for a reference.
        steps: Number of steps.
        dtype: Type of the products.

    Returns:
        (R, C) in the type of `x`.

    Source: Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon); torch 2.9, torch.optim.Muon.
    """
    a, b, c = COEFFICIENTS
    # Of each row first: a CPU adds millions of small squares to one large sum inexactly.
    norm: Tensor = torch.linalg.vector_norm(torch.linalg.vector_norm(x, dim=1))
    near_one = (x / norm.clamp(min=EPS)).to(dtype)
    is_tall = x.shape[0] > x.shape[1]
    if is_tall:
        near_one = near_one.t()
    for _ in range(steps):
        gram = near_one @ near_one.t()
        polynomial = gram.to(x.dtype) * b + (gram @ gram) * c  # rounded once
        product = polynomial.to(dtype) @ near_one
        near_one = (near_one.to(x.dtype) * a + product).to(dtype)
    if is_tall:
        near_one = near_one.t()
    return near_one.to(x.dtype)


def update_scale(num_rows: int, num_columns: int, kind: Literal["original", "moonlight"]) -> float:
    """Factor of an orthogonal update by the shape of its matrix.

    Args:
        kind: `original` keeps the change of outputs equal for all shapes. `moonlight` gives entries a root mean square
            of about 0.2, as AdamW's updates have, so that AdamW's learning rate and weight decay fit.

    Source: Jordan et al. 2024, as above; Liu et al. 2025 (arXiv:2502.16982) section 2.2.
    """
    if kind == "original":
        return math.sqrt(max(1.0, num_rows / num_columns))
    return 0.2 * math.sqrt(max(num_rows, num_columns))
