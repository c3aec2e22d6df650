"""Other forms of a network whose channels are no multiples of a vector, which need no copies for them. Read layouts.py first.

Enters and leaves: a `Network`. layouts: the first channel of each slice of a tensor; partial_sums: sums of parts as residuals
of convolutions; padding: a network over padded pieces, and both as options that the plan weighs (rewrites.drafts).
"""
