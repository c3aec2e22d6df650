"""Other ways to run a network, as options that the plan weighs. Read siblings.py first.

Enters and leaves: a `Network`. Each module's `offer` adds ops that exist only under an option (`Op.when`) and never decides.
All options of a group compute the same outputs.
"""
