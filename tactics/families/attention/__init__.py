"""Attention in one launch. Read tokens.py first.

Enters and leaves: as in the folder above. operands: the operands' addresses in a format's memory, shared by both kernels;
channels: cross_covariance.cu, few scores over long rows; tokens: attention.cu, any number of scores over short ones.
"""
