"""CPU kernels in C++, built on first use; without a compiler torch's operations stay."""
