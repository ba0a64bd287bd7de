"""Benchmarks of the host's work: scheduling and HTTP without a model, measured and simulated."""
