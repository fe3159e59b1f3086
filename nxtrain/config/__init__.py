"""Configuration: every knob (schema), where values come from (load), what fits together (check), how it prints."""
