"""Commands: one subcommand is one lazy import and one call."""
