"""Tactics: which kernels could run a problem (candidates), how long they take (predict, timing), and the choice (planner)."""
