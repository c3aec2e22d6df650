"""The exact minimum over tactics, formats and options. Read plan.py first, eliminate.py for the algorithm.

Enters: a `Graph` of tensors with formats and ops with timed entries. Leaves: a `Plan`, and the plan with a layer forced.

elimination_order, boxes, substitution, eliminate: the least sum of tables; graph: the ops that may run; reformats and their
cost; formulation: both as such tables; splitting: a graph too wide in parts; changes of a plan; plan: the exact minimum;
forced_plans: the plans with a layer forced.
"""
