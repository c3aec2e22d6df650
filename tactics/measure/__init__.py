"""Times: measured in a child process on a GPU, or predicted. Read timing.py first.

Enters: a problem and its tactics. Leaves: a `Time` for each, from the cache, the GPU or the prediction.

child: a process that may hang or die, and the pipe to it; worker: the program of that process, which verifies and times tactics
on a GPU (tactics/sampling); cache: measurements in a file of JSON lines; race: how many samples each tactic gets; compiling:
kernels compiled in threads meanwhile; racing: a race of a problem's tactics on the GPU at hand; turns: a lock, so that one race
runs at a time on a GPU; spread: races on the GPUs of a Ray cluster; timing: the timers that builds call; lazy: a timer that
times only the tactics that a plan may need.
"""
