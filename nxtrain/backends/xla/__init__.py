"""PyTorch/XLA: devices, worlds, graphs, tracing and the environment that torch-xla reads."""
