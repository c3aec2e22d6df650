"""A session over a model of open sizes: an engine for each size that it meets, and memory bound by address."""
