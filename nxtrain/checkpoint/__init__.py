"""Checkpoints with tensors by Hugging Face name and whole shape: any layout of ranks reads those of any other.

A checkpoint is a folder: files of `torch.distributed.checkpoint`, `meta.json`, and the tokenizer if the run has one.
A tensor's key is `<kind>/<global name>`. The kind is `model` for the weights, or the name of an optimizer state.
"""
