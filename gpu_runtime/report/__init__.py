"""An engine's plan as an HTML page, and as files for other viewers. Read data.py first.

Enters: an engine's record. Leaves: one HTML file that needs no network, a trace, notes for an ONNX model's nodes.

data: the content of a page as JSON, memory included; drawing: places of the graph's nodes and edges; page: the file, from the
template and the scripts in this folder; outlooks: plans for several devices or batches as tables, curves: plans for several
batches as a page; notes: a trace for Perfetto, notes for Netron.
"""
