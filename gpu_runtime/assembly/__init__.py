"""A plan to what an engine holds. Read assemble.py first.

Enters: a `Table` and the plan chosen from it.
Leaves: layers and steps in execution order with every address, and the arena of packed weights.

memory: offsets from live ranges; dataflow: proof that layers read what was written for them; assemble: all of it.
"""
