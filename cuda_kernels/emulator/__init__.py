"""A PTX interpreter: runs what NVRTC emits for our .cu files on the CPU, and checks and counts while it does."""
