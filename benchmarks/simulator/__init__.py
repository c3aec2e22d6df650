"""Clocks of a kernel's main loop on tensor cores, simulated from its machine code: docs/cycles.md. Read simulate.py last.

sass: machine code as instructions; machine: rates and latencies of an SM, and what is swept; steps: instructions as the
simulation takes them; simulate: clocks. The product reads only the shares that come of it, cuda_kernels/shares.json.
"""
