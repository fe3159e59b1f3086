"""Command line interface; each subcommand imports its implementation when it is called."""
