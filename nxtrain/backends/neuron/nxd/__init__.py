"""NeuronX Distributed (NxD): parallel layers, order of ranks, sum of gradients.

Everything else is nxtrain's own: projections fused as segments of one column layer, the loss, ZeRO-1, norm and
clipping, updates, checkpoints. This package imports NxD only when a run has chosen NxD's layers.

Source: https://github.com/aws-neuron/neuronx-distributed, fecfe75 (0.15, SDK 2.26) to fbac349 (0.18, SDK 2.29).
"""
