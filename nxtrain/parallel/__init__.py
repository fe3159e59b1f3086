"""Layers and losses that are cut over ranks, written on `Collectives` alone."""
