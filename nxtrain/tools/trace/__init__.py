"""Tracing of a training step on one CPU, for any rank: its graphs, memory, and order of operations."""
