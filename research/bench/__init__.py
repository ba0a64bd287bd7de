"""Benchmarks. They may import everything; nothing imports them, and the wheel leaves them out."""
