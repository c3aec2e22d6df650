"""The rows of `make gpu` (benchmarks/gpu.py has their table) that are no older benchmark.

A row enters as a command line (`python -m benchmarks.experiments.NAME --out FILE --seconds S`, run.py), and leaves one JSON
file with the GPU, the driver and the date in it, which is written anew after each step. Read first: run.py, then layers.py.
"""
