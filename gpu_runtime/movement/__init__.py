"""Elements of tensors followed through Reshape, Transpose, Slice, Split and Gather.

Enters: ops of a `Network`. Leaves: facts for rewrites. strides: which element of a source each element of an output is,
and as which strides; orders: runs of moves that leave pixels in place, composed to one order of channels.
"""
