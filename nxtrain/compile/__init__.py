"""Compiled graphs of a node: the cache, its transfer between nodes, and the manifest of a run's graphs.

Data about files only: neither torch nor a compiler is imported here.
"""
