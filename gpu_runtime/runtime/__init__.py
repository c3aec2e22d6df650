"""The engine's record, its file, and running it. Read engine.py first.

Enters: an engine file, or what assembly/ made. Leaves: arrays of the network's outputs.
Needs neither onnx nor the planner.

derive: what follows from a layer, its steps; regions: who lies where and when; verify: a plan says what follows from it;
schema: what a plan must look like; engine: the file; context: runs it.
"""
