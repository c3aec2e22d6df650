"""Families that read and write each element a few times and that memory limits. Read movement.py first.

Enters and leaves: as in the folder above. movement: layouts, concatenations and pools; gather: by tables of indices, and
resizes; pointwise: chains of elementwise functions; reduce: sums, maxima and norms along axes.
"""
