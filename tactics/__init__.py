"""What could run (candidates), how long it takes (predict, timing), and what to pick (plan)."""
