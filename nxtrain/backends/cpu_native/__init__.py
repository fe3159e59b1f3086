"""Shared memory collectives of one CPU host in C++, built on first use; without a compiler, ranks use gloo."""
