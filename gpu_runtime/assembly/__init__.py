"""Turns a plan into the contents of an engine. Read assemble.py first.

Enters: a `Table` and the plan chosen from it.

Leaves: layers in execution order with every place in memory, and the arena of packed weights.

memory: offsets from live ranges; assemble: the whole stage.
"""
