"""A plan to what an engine holds. Read assemble.py first.

Enters: a `Table` and the plan chosen from it.
Leaves: layers in execution order with every place in memory, and the arena of packed weights.

memory: offsets from live ranges; assemble: all of it.
"""
