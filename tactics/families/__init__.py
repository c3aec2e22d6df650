"""Kernel families: the methods by which problems are computed, one per file. Read table.py first, then conv_gemm.py.

Each family has these functions, with the same arguments and results in all of them:

    candidates(problem, device)        yields (tactic or kernel, None or the reason against it)
    launches(problem, tactic)          the kernel launches of the tactic, in order
    pack(problem, tactic, weights)     section name -> packed weights, as the kernels read them
    section_bytes(problem, tactic)     section name -> the bytes of these
    counts(problem, tactic, device)    bytes moved and predicted microseconds, which roofline.py and predict.py use

CASES: kernel -> small problems on which gpu-runtime doctor runs it.

conv_gemm: implicit GEMM, dense and 2:4; conv_bytes: the same for whole numbers of 8 bits; strips, hopper: folders of further
implicit GEMMs; conv_grouped, conv_stem (stem_patch), conv_depthwise, conv_fp32: other convolutions; conv_transpose: one
convolution per phase; back_to_back, squeeze_excite, conv_scaled: several layers at once; bandwidth, a folder: movement, gather,
pointwise, reduce; matmul; attention, a folder; array_function: library functions; merged: groups of a convolution merged;
table: the families by kernel and by problem.
"""
