"""Blocks of a decoder that know no device and no rank."""
