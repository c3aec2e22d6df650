"""Clocks of a kernel's main loop on tensor cores, simulated from its machine code: docs/cycles.md."""
