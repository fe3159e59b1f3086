"""PyTorch/XLA: backend, environment variables, rendezvous of ranks, graph loops and graph tracing."""
