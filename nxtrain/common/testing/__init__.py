"""Fault injection: failures at named points of a run."""
