"""What is computed, without how: frozen, hashable records. Read problem.py first.

`str()` is the key of caches, `reference()` the meaning in NumPy. Features are fields of the record.
"""
