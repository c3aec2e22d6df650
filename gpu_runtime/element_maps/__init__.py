"""Follows elements of tensors through Reshape, Transpose, Slice, Split and Gather.

Enters: ops of a `Network`. Leaves: facts for lowering and rewrites. strides: the source element of each element of an output,
and their strides; joins: the same through Concats of parts of one tensor; orders: runs of moves that leave pixels in place,
composed to one order of channels.
"""
