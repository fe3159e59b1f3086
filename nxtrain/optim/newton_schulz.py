"""Newton-Schulz iteration, with which Muon sets the singular values of a matrix to nearly one."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients a, b, c of the polynomial a x + b x^3 + c x^5. Its slope at zero is large, and results stay near one."""

EPS = 1e-7
"""Minimum norm by which a matrix is divided."""


def orthogonalize(x: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Orthogonalize a matrix: apply the polynomial `steps` times to the singular values of the normalized matrix.

    Singular vectors stay unchanged. Five steps bring singular values above 2e-3 of the norm to between 0.68 and 1.21. A
    matrix of zeros stays zero.

    Args:
        x: (R, C) float32, or float64 for a reference.
        steps: Number of iterations.
        dtype: Type of the matrix products.

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
    """Scale of an orthogonalized update by the shape of its matrix.

    Args:
        kind: `original` gives equal changes of outputs for all shapes. `moonlight` gives entries a root mean square of
            about 0.2, like updates of AdamW, so that AdamW's learning rate and weight decay fit.

    Source: Jordan et al. 2024, as above; Liu et al. 2025 (arXiv:2502.16982) section 2.2.
    """
    if kind == "original":
        return math.sqrt(max(1.0, num_rows / num_columns))
    return 0.2 * math.sqrt(max(num_rows, num_columns))
