"""The engine's record, its file, and running it. Read engine.py first.

Enters: an engine file, or what assembly/ made. Leaves: arrays of the network's outputs.
Needs neither onnx nor the planner.
"""
