"""Checks of a machine: devices, network, host, packages, collectives."""
