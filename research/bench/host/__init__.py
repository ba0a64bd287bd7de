"""Benchmarks of the host's work, and processes that benchmarks start and watch."""
