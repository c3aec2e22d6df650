"""The exact minimum over tactics, formats and options. Read plan.py first, eliminate.py for the algorithm.

Enters: a `Graph` of tensors with formats and ops with timed entries. Leaves: a `Plan`, and what
it would be with a layer forced.

elimination_order, boxes, eliminate: the least sum of tables; graph: what may run; reformats and their cost; formulation: both
as such tables; splitting: a graph too wide in parts; changes of a plan; plan: the exact minimum.
"""
