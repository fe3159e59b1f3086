"""Compiled graphs of a node: what its cache holds, how it travels between nodes, and what a run may count on.

Data about files only: neither torch nor a compiler is imported here.
"""
