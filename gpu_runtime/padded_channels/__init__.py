"""Channels that are no multiples of a vector: other forms of a network that need no copies for them. Read layouts.py first.

Enters and leaves: a `Network`. layouts: where each piece of a tensor begins; sums: sums of parts as residuals of convolutions;
padding: a network over padded pieces, and both as options that the plan weighs (rewrites.drafts).
"""
