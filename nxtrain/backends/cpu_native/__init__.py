"""Kernels of the CPU backend in C++, which are built on first use; without a compiler torch's operations stay."""
