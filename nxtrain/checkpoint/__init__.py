"""Sharded checkpoints that any parallel layout can load, their mirror, and resume.

A checkpoint is a folder: files of `torch.distributed.checkpoint`, `meta.json`, and the tokenizer if the run has one.
A tensor's key is `<kind>/<global name>`. The kind is `model` for the weights, or the name of an optimizer state.
"""
