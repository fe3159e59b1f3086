"""Compiled graphs of a node: compile cache, manifest, and transfer between nodes.

These modules handle files only. They import neither torch nor a compiler.
"""
