"""The engine's record, its file, and running it. Read plan_record.py first.

Enters: an engine file, or what assembly/ made. Leaves: arrays of the network's outputs.
Needs neither onnx nor the planner.

fields, findings, plan_record: what a file says; derive: what follows from a layer, its steps; regions: who lies where and
when; verify: a plan says what follows from it; bounds: offsets and names lead somewhere; engine: the file; context: runs it.
"""
