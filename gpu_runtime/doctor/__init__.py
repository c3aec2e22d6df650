"""`gpu-runtime doctor`: whether this machine computes what it should, and how fast. Read examine.py first.

Enters: the GPU at hand, or a device's name for the emulator. Leaves: an `Examination`, a verdict for each family of kernels,
and `Findings` that builds read afterwards.

cases: small problems and tactics of every kernel; rates: bandwidth, launches and clocks beside the table's; worker: the child
process in which they run; findings: what failed, kept for builds; host: what needs no GPU, versions among it; examine: all of
it within a time limit; wording: the verdicts as text, and as JSON for a bug report.
"""
