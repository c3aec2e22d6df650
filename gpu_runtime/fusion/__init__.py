"""Fuses ops of a network. Read fuse.py first.

Enters: a `Network` from lowering/ with one op for each node, or a few in a row, and weights as stored or FP64. Leaves: a
`Network` of fewer ops with weights in FP32, with groups of options where there is more than one way.

steps: a pointwise op's operations; spelled: functions in several ops; chains: pointwise ops in a row; convolutions: their
epilogues; epilogues: the pass that builds these; concats: convolutions before a Concat; prologues; branches: sums of
convolutions; rounded: FP32 weights; moves: equal moves merged; rearranged: Concats of a tensor's parts; fuse: the order of all.
"""
