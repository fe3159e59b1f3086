"""Neural network modules of a decoder and of LoRA adapters, independent of devices and ranks."""
