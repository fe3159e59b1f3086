"""The graphs that a compiler will see, traced on one CPU for any rank of any world."""
