"""What keeps a run going, or ends it well: signals, hangs, slow ranks, crash loops."""
