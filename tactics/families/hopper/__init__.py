"""Kernels on Hopper's asynchronous tensor cores, sm_90a alone.

Leaves: what a family has (tactics/kernels.py), of conv_dense_sm90 and conv_sparse24_sm90.
"""
