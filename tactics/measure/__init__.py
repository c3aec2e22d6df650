"""Times: measured in a child process on a GPU, or predicted. Read timing.py first.

Enters: a problem and its tactics. Leaves: a `Time` for each, from the cache, the GPU or the prediction.

child: a process that may hang or die, and how it is asked; worker: the one that verifies and times on a GPU, with a stopwatch,
samples at a steady clock, copies of weights, and references; trial: one tactic on a GPU or in the emulator, judged; faults:
whose fault it is that a tactic has no time; cache: measurements as JSON lines; race: which tactic gets how many samples; turns:
one race at a time on a GPU; compiling: kernels, meanwhile; timing: all of these, or predictions; lazy: few tactics timed.
"""
