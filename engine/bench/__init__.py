"""Benchmarks of the engine: each a command that measures this machine and writes a record."""
