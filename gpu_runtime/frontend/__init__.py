"""ONNX in. Read importer.py first.

Enters: an ONNX file, sizes of its open dimensions, whether weights are to be pruned to 2:4.
Leaves: `importer.Imported`: an onnx-ir graph that was checked, converted to one opset, folded and respelled.

load and check what is wrong with a file; weights how they stand to 2:4, and their pruning; convert one opset; normalize one
spelling; constants folded; channels_first products; split_attention by a softmax of two; clean nothing left that constants
decide; importer these in order; pattern what inspect-sparsity shows; queries questions about the graph; describe what a model
is.
"""
