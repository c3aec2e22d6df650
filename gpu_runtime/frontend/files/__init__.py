"""Model files. Read load.py first.

Enters: an ONNX file, its bytes or a ModelProto. Leaves: a checked ModelProto in one opset.

source: the forms in which a model may be given; load, check: read a file and find its faults; quantized: gives quantised
operators one spelling; weights: stored weights, their 2:4 pattern and pruning; convert: converts to one opset.
"""
