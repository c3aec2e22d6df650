"""Problems: frozen, hashable records that each state a computation, without a method for it. Read problem.py first.

`str()` of a problem is its key in caches, `reference()` its meaning in NumPy. Optional steps are fields of the record.

protocol: the interface of problems; gather, convolution, attention, reductions, problem, library_problem: classes of problems;
batches: a problem at another batch; prologue, epilogue: the steps of a convolution's kernel before and after its products;
pointwise_ops: elementwise functions, a row each; intervals: the image of an interval under each of them, and the operands at
which rounding ruins a result; array_functions: rare operators over NumPy or CuPy; operators: the ONNX operators, by how they
treat channels; codec: problems as JSON.
"""
