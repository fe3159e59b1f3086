"""Integration of NeuronX Distributed (NxD): parallel layers, rank order and gradient all-reduce.

All other parts are nxtrain's own: fused projections, the loss, ZeRO-1, gradient norm and clipping, optimizer updates
and checkpoints. This package imports NxD only when a run has chosen NxD's layers.

Source: https://github.com/aws-neuron/neuronx-distributed, fecfe75 (0.15, SDK 2.26) to fbac349 (0.18, SDK 2.29).
"""
