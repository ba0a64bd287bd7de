"""Benchmarks of HTTP, text and batches."""
