"""`python -m gpu_runtime ...` is `gpu-runtime ...`, without installation."""

from gpu_runtime.cli import main

main()
