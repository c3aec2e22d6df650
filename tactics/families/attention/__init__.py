"""Attention in one launch. Read tokens.py first.

Enters and leaves: as in the folder above. operands: where operands lie in a format's memory, as both kernels are told it;
channels: cross_covariance.cu, few scores over long rows; tokens: attention.cu, any number of scores over short ones.
"""
