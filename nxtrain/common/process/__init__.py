"""The process of a rank: signals, stacks, deadlines, console, clock."""
