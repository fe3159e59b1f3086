"""Configuration: keys (schema), origins (load), rules between keys (check)."""
