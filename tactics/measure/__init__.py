"""Times: measured in a child process on a GPU, or predicted. Read timing.py first.

Enters: a problem and its tactics. Leaves: a `Time` for each, from the cache, the GPU or the prediction.

worker: the child process that verifies and times on a GPU; cache: measurements as JSON lines; timing: both, or predictions.
"""
