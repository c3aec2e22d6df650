"""The accuracy of outputs: onnxruntime runs a model, and an engine is compared with it. Read errors.py first.

sessions: ONNX models in onnxruntime (an optional package), in batches and with any tensor as an output; errors: the measures of
an error; metrics: scores against labels; rounding: a model with tensors rounded to FP16; compare: an engine compared with its
model, tensor by tensor; comparison: the result; wording: the result as text.
"""
