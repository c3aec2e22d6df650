"""A network to a network whose ops do more at once. Read fuse.py first.

Enters: what lowering/ leaves, a `Network` with one op for each node, or a few in a row, and weights as stored or FP64.
Leaves: a `Network` of fewer ops with weights in FP32, with groups of options where there is more than one way.

steps of a pointwise op; spelled functions; chains of ops; convolutions and what they take in; epilogues: the pass that asks
them all; concats of convolutions; prologues; branches that are added; rounded weights; moves alike; rearranged: Concats of a
tensor's parts as moves of it; fuse: the order of all.
"""
