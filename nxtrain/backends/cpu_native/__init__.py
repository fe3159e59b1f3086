"""Collectives of a CPU host in C++, built on first use; without a compiler, gloo is used."""
