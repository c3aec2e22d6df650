"""The engine's record, and running it. Read plan_record.py first.

Enters: what gpu_runtime/engine.py read from a file, or what assembly/ made. Leaves: arrays of the network's outputs.
Needs neither onnx nor the planner.

fields, findings, plan_record: what a file says; compatibility: for which device and kernels; derive: what follows from a layer,
its steps; dataflow: proof that layers read what was written for them; verify: steps of a plan that is one; bounds: offsets and
names lead somewhere; steps, feeds: what is launched, read and written; context: runs it.
"""
