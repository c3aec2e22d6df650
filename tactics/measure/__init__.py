"""Times: measured in a child process on a GPU, or predicted. Read timing.py first.

Enters: a problem and its tactics. Leaves: a `Time` for each, from the cache, the GPU or the prediction.

child: a process that may hang or die, and how it is asked; worker: it verifies and times on a GPU (tactics/sampling); cache:
measurements as JSON lines; race: which tactic gets how many samples; compiling: kernels, meanwhile; racing: a race of a
problem's tactics on the GPU at hand; turns: one race at a time on a GPU; timing: all of these, or predictions; lazy: few
tactics timed.
"""
