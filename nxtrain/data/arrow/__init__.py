"""Corpora in Arrow files: preparation from other formats, random access, and inspection."""
