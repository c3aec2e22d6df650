"""CUDA kernels, one .cu per kernel, and the code to describe a device, compile and launch.

Start with conv_sparse24.cu.
"""
