"""Benchmarks of single steps of a GPU, and the report of what the kit of `deploy/gpu` brought."""
