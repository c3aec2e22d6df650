"""Elements of tensors followed through Reshape, Transpose, Slice, Split and Gather.

Enters: ops of a `Network`. Leaves: facts for lowering and rewrites. strides: which element of a source each element of an
output is, and as which strides; joins: the same through Concats of what one tensor gives; orders: runs of moves that leave
pixels in place, composed to one order of channels.
"""
