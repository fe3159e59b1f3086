"""Job files of clusters, one module per kind of cluster, rendered from a resolved run."""
