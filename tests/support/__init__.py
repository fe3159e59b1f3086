"""Helpers that several lanes of the tests share."""
