"""AWS Trainium: Neuron packages, instance types, and the backends for PyTorch/XLA and TorchNeuron."""
