"""A tactic run, judged and timed where a GPU is at hand; what tactics/measure does in a process of its own.

Enters: a problem and a tactic. Leaves: its error against the problem's reference, and samples of its time.

faults: whose fault it is that a tactic has no time; data: random inputs and weights; references: what they make of each other;
trial: a tactic on a GPU or in the emulator, judged; copies: weights in several places, so that L2 does not keep them;
stopwatch: the time and the clock of a run; samples: repeated until the clock is steady.
"""
