"""What is computed, without how: frozen, hashable records. Read problem.py first.

`str()` is the key of caches, `reference()` the meaning in NumPy. Features are fields of the record.

gather, convolution, attention, reductions, problem, library_problem: kinds of problems; prologue, epilogue: what a convolution
does besides; pointwise_ops: elementwise functions, a row each; intervals: what they
make of intervals, and where rounding ruins them; array_functions: rare operators over NumPy or CuPy; operators: all of ONNX's,
by how channels pass; codec: problems as JSON.
"""
