"""Convolutions whose pixels lie in shared memory once for all taps, in strips. Read geometry.py first.

Enters: a convolution with an output of its input's size, and a device or a tactic.
Leaves: what a family has (tactics/kernels.py), of conv_strip and conv_strip_sparse24.
"""
