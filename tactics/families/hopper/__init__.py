"""Kernels on Hopper's asynchronous tensor cores, for sm_90a only.

Leaves: the functions of a family (tactics/kernels.py), for conv_dense_sm90 and conv_sparse24_sm90.
"""
