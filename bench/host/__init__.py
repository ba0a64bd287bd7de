"""Benchmarks of the host's share: scheduling and HTTP without a model, measured and simulated."""
