"""Benchmarks of the load-test client."""
