"""Problems: computations without their method, as frozen, hashable records. Read problem.py first.

`str()` is the key of caches, `reference()` the meaning in NumPy. Features are fields of the record.

gather, convolution, attention, reductions, problem, library_problem: kinds of problems; prologue, epilogue: the steps that a
convolution's kernel does before and after it; pointwise_ops: elementwise functions, a row each; intervals: the image of an
interval under each of them, and where rounding ruins a result; array_functions: rare operators over NumPy or CuPy; operators:
all of ONNX's, by how channels pass; codec: problems as JSON.
"""
