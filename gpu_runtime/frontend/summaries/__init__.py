"""Models in words. Read describe.py first.

Enters: an ONNX file. Leaves: `describe.ModelInfo`, of any model that can be parsed, and `pattern.Row`s.

pattern: the rows of inspect-sparsity; describe: a model in words.
"""
