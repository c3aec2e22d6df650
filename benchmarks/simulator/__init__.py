"""Clocks of a kernel's main loop on tensor cores, simulated from its machine code: docs/cycles.md. Read simulate.py last.

sass: machine code as instructions; machine: rates and latencies of an SM, and the swept ones; steps: instructions as the
simulation takes them; state, warpgroups, sm: a simulated SM; simulate: clocks of a loop. The product reads only the shares
that come of it, cuda_kernels/shares.json.
"""
