"""Job files: one module for each kind of cluster, all from one resolved run."""
