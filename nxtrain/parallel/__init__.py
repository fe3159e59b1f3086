"""Layers and losses sharded over ranks, on the interface `Collectives` alone."""
