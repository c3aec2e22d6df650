"""Runs engines behind servers. Requests of some rows enter; outputs, or one error for each, leave.

Read rows.py first: it joins requests for every server. A server's own module (triton.py, ray.py) is imported only where that
server runs.
"""
