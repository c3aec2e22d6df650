"""How far outputs are from what they should be: onnxruntime runs a model, an engine is compared with it.

`sessions` runs ONNX models in onnxruntime, which need not be installed, in batches and with any tensor shown; `errors` says
what an error is. `layers` compares an engine with its model, tensor by tensor. Read errors.py first.
"""
