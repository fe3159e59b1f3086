"""Configuration of a run: schema of the keys, loading of files and overrides, and checks between keys."""
