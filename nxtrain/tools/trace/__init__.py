"""Graphs, memory and order of a step, traced on one CPU for any rank."""
