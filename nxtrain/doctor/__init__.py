"""Checks of one machine before and between runs: devices, network, host, packages, collectives."""
