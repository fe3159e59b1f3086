"""The command line: one subcommand is one lazy import and one call."""
