"""Benchmarks that need torch: precision, many samples, plots."""
