"""Modules of a decoder, independent of devices and ranks."""
