"""One HTML page of runs: their course, their stability, their use of time, and their differences."""
