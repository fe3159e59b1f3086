"""The binding to NeuronX Distributed (NxD): its parallel layers, its order of ranks, its sum of gradients.

Everything beside those is nxtrain's own: projections fused as segments of one column layer, the loss, ZeRO-1, norm and
clipping, updates, checkpoints. This package imports NxD only when a run has chosen it.

Source: https://github.com/aws-neuron/neuronx-distributed, v2.26.0 (0.15) to v2.29.0 at fbac349 (0.18).
"""
