"""An engine's plan as a page to look at, and as files for the viewers that people have. Read data.py first.

Enters: an engine's record. Leaves: one HTML file that needs no network, a trace, notes for an ONNX model's nodes.

data: what a page shows, as JSON, memory too; drawing: where the plan's graph is drawn; page: the file, from the template and
the scripts in this folder; outlooks: plans for several devices or batches as tables, curves: those for batches as a page;
notes: a trace for Perfetto, notes for Netron.
"""
