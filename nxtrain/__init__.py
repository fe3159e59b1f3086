"""nxtrain: train Llamas on Trainium, and the same model code on CUDA GPUs, CPU and PyTorch/XLA."""

from __future__ import annotations

__version__ = "0.1.0"
