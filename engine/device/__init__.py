"""Builds, caches and runs the step graph. The only package that imports MAX."""
