"""Checkpoints that know tensors by their Hugging Face names and whole shapes, so that any layout can read any other's.

A checkpoint is a folder: files of `torch.distributed.checkpoint`, `meta.json`, and the tokenizer if there is one. A
tensor's key is `<kind>/<global name>`, where kind is `model` for the weights or the name of an optimizer state.
"""
