"""PyTorch/XLA: devices, worlds, graphs and tracing."""
