"""The engine's record, and running it. Read plan_record.py first.

Enters: what gpu_runtime/engine.py read from a file, or what assembly/ made. Leaves: arrays of the network's outputs.
Needs neither onnx nor the planner.

fields, findings, plan_record: what a file says; derive: what follows from a layer, its steps; regions: who lies where and
when; verify: a plan says what follows from it; bounds: offsets and names lead somewhere; steps, feeds: what is
launched, read and written; context: runs it.
"""
