"""What `gpu-runtime doctor` runs on a GPU: small problems of every kernel, and how fast the device is. Read cases.py first.

Enters: a device. Leaves: for each case whether the kernel computes it, and `Findings` that builds read afterwards.

cases: the problems and tactics; trial: one of them, run and judged; rates: bandwidth, launches and clocks beside the table's;
worker: the child process in which all of these run; findings: what failed, kept for builds.
"""
