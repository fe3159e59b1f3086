"""Files that start a run on a cluster: one module for each kind of cluster, all from one resolved run."""
