"""The HTML page of runs, and the terminal view of a run."""
