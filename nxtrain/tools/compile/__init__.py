"""Compiled graphs of a node: cache, transfer between nodes, manifest.

Data about files only: neither torch nor a compiler is imported here.
"""
