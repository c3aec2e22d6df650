"""Pruning an ONNX model to 2:4: which weights, in which order of channels, at what cost.

An ONNX file enters; the same model leaves with other weights, and a record of what each layer lost. `prune.py` is the way
through: `selection` says which layers, `channel_spaces` (with `channel_rules`, an operator at a time) which channels may change
places, `permute` puts them where most is kept, frontend.weights sets the zeros, `calibrate` measures and takes back. Read
channel_spaces.py first.
"""
