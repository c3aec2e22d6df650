"""How problems are computed: one file per kernel family. Read table.py first, then conv_gemm.py.

Enters: a problem and a device, or a problem and a tactic.
Leaves: candidates with a reason for each rejection; launches; packed weights; predicted times.
"""
