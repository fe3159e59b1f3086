"""Modules of a decoder and its adapters, independent of devices and ranks."""
