"""CUDA kernels, one .cu per kernel, and the verbs around them: describe a device, compile, launch.

Start with conv_sparse24.cu.
"""
