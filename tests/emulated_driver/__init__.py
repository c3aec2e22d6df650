"""An emulated CUDA driver: real CuPy, cuda-bindings and pynvml over a libcuda.so.1 whose kernels run in the PTX emulator.

`python -m tests.emulated_driver COMMAND...` runs a command on it; README.md says which faults it can show and which not. Read
driver.h first, then streams.cpp; kernels.py is the half that the library calls.
"""
