"""The exact minimum over tactics, formats and options. Read plan.py first, eliminate.py for the algorithm.

Enters: a `Graph` of tensors with formats and ops with timed entries. Leaves: a `Plan`, and what
it would be with a layer forced.
"""
