"""`gpu-runtime doctor`: the correctness and speed of this machine's GPU. Read examine.py first.

Enters: the GPU at hand, or a device's name for the emulator. Leaves: an `Examination`, a verdict for each family of kernels,
and `Findings` that builds read afterwards.

cases: small problems and tactics of every kernel; measured_rates: bandwidth, launches and clocks compared with the tables;
worker: the child process that runs them; known_failures: failures, kept for builds; host: checks without a GPU, versions
included; examine: all checks within a time limit; wording: the verdicts as text, and as JSON for a bug report.
"""
