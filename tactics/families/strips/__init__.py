"""Convolutions with pixels in shared memory once for all taps, in strips. Read geometry.py first.

Enters: a convolution with an output of its input's size, and a device or a tactic.

Leaves: the functions of a family (tactics/kernels.py), for conv_strip and conv_strip_sparse24.
"""
