"""Prunes an ONNX model to 2:4: which weights, in which order of channels, at what cost.

Enters: an ONNX model. Leaves: the model with 2:4 weights, and a record of each layer's loss. `prune` calls the steps in order:
`selection` chooses layers, `channel_spaces` (with `channel_rules`, one rule per operator) finds channels that may change
places, `permute` reorders them to lose less, frontend.files.weights sets the zeros, `calibrate` measures and restores layers.
Read channel_spaces.py first.
"""
