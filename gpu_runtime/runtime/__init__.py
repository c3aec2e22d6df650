"""The engine's record, and running it. Read plan_record.py first.

Enters: an engine, read from a file by gpu_runtime/engine.py or made by assembly/. Leaves: arrays of the network's outputs.
Needs neither onnx nor the planner.

fields, findings, plan_record: the file's records; compatibility: checks of device and kernels; derive: a layer's steps;
dataflow: proof that layers read the bytes written for them; verify: the steps of a valid plan; bounds: checks of offsets and
names; steps, feeds: launches, inputs and outputs; context: runs an engine.
"""
