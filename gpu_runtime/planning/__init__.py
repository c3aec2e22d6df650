"""Turns a network into the planner's tables. Read tables.py first.

Enters: a `Network`, a device, a timer, the formats that inputs and outputs may have.

Leaves: a `Table`: for every op its tactics per combination of formats and places, with times, as tactics/planner solves them.

alternatives: the network with all options that rewrites offer; places: tensors inside others, and views; io_formats: requested
formats at the edges; entries: tactics that may run one op; tables: all of it timed; counterfactuals: the plan under other
conditions; invariant: one choice for several batches; independent_images: whether images of a batch are computed
independently; batch_pieces: batches that run in pieces.
"""
