"""HTML report of one or more runs, and terminal view of running runs."""
