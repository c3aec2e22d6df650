"""The engine's record, its file, and running it. Read plan_record.py first.

Enters: an engine file, or what assembly/ made. Leaves: arrays of the network's outputs.
Needs neither onnx nor the planner.

fields, findings, plan_record: what a file says; derive: what follows from a layer, its steps; dataflow: proof that layers read
what was written for them; verify: steps of a plan that is one; bounds: offsets and names lead somewhere; engine: the file;
context: runs it.
"""
