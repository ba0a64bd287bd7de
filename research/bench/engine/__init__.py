"""Benchmarks of kernels and of the engine, without a server."""
