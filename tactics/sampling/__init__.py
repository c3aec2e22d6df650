"""Runs, judges and times a tactic where a GPU is at hand; tactics/measure does this in a process of its own.

Enters: a problem and a tactic. Leaves: its error against the problem's reference, and samples of its time.

faults: whether a missing time is the tactic's fault; data: random inputs and weights; references: their expected outputs;
trial: a tactic on a GPU or in the emulator, judged; copies: weights in several places, so that L2 does not keep them;
stopwatch: the time and the clock of a run; samples: repeated until the clock is steady.
"""
