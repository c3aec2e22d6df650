"""`gpu-runtime doctor`: whether this machine computes what it should, and how fast. Read examine.py first.

Enters: the GPU at hand, or a device's name for the emulator. Leaves: an `Examination`, a verdict for each family of kernels.

host: what needs no GPU, versions among it; examine: cases, checks and rates in a child process, within a time limit; wording:
the verdicts as text, and as JSON for a bug report.
"""
