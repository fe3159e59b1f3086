"""Corpora in Arrow files: preparation, random access and inspection."""
