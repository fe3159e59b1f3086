"""Corpora in Arrow files: preparation, random access, packing and inspection."""
