"""Health checks of a machine: accelerators, network, host, packages and collectives."""
