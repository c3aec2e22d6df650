"""The steps that verify and time a tactic in a process with a GPU; tactics/measure calls them in a child process.

Enters: a problem and a tactic. Leaves: its error against the problem's reference, and samples of its time.

faults: whether a missing time is the tactic's fault; data: random inputs and weights; references: the expected outputs;
trial: runs a tactic on a GPU or in the emulator and judges its output; copies: weights in several places of memory, so that L2
does not keep them from run to run; stopwatch: the time and SM clock of one run; samples: repeats a sample until the clock is
steady.
"""
