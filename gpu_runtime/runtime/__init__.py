"""The engine's record, and running it. Read plan_record.py first.

Enters: what gpu_runtime/engine.py read from a file, or what assembly/ made. Leaves: arrays of the network's outputs.
Needs neither onnx nor the planner.

fields, findings, plan_record: the file's records; compatibility: checks of device and kernels; derive: a layer's steps;
dataflow: proof that layers read the bytes written for them; verify: the steps of a valid plan; bounds: checks of offsets and
names; steps, feeds: launches, inputs and outputs; context: runs an engine.
"""
