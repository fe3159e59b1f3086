"""Configuration: keys (schema), origin of values (load), rules between keys (check), output (show)."""
