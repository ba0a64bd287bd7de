"""Benchmarks, the paper's experiments, and the records of both."""
